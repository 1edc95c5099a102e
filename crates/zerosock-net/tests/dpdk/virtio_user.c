/*
 * Sends frames over the virtio_user driver of DPDK and checks that each comes back.
 *
 * virtio_user EAL-OPTIONS -- COUNT
 *
 * ReceivedFrame number i has 60 to 1514 bytes: addresses, an Ethernet type for experiments, the number, and bytes
 * that follow from it. The other side exchanges the addresses and sends it back.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include <rte_cycles.h>
#include <rte_eal.h>
#include <rte_ethdev.h>
#include <rte_mbuf.h>

#define WINDOW 32
#define SECONDS 60

static unsigned length(uint32_t number) { return 60 + number * 37 % 1455; }

static uint8_t byte(uint32_t number, unsigned at) { return (uint8_t)(number * 31 + at * 7); }

static void fill(uint8_t *frame, uint32_t number)
{
    frame[12] = 0x88;
    frame[13] = 0xb5;
    for (int i = 0; i < 4; i++)
        frame[14 + i] = (uint8_t)(number >> (24 - 8 * i));
    for (unsigned at = 18; at < length(number); at++)
        frame[at] = byte(number, at);
}

static int differs(const uint8_t *frame, unsigned len, uint32_t number)
{
    if (len != length(number))
        return 1;
    for (int i = 0; i < 4; i++)
        if (frame[14 + i] != (uint8_t)(number >> (24 - 8 * i)))
            return 1;
    for (unsigned at = 18; at < len; at++)
        if (frame[at] != byte(number, at))
            return 1;
    return 0;
}

static void stop(const char *what)
{
    fprintf(stderr, "virtio_user: %s\n", what);
    exit(1);
}

int main(int argc, char **argv)
{
    int used = rte_eal_init(argc, argv);
    if (used < 0)
        stop("the environment of DPDK cannot be set up");
    if (argc - used < 2)
        stop("usage: virtio_user EAL-OPTIONS -- COUNT");
    uint32_t count = (uint32_t)atoi(argv[used + 1]);

    struct rte_mempool *pool =
        rte_pktmbuf_pool_create("frames", 2047, 0, 0, RTE_MBUF_DEFAULT_BUF_SIZE, SOCKET_ID_ANY);
    struct rte_eth_conf conf = {0};
    uint16_t port = 0;
    if (pool == NULL)
        stop("no memory for frames");
    if (rte_eth_dev_configure(port, 1, 1, &conf) != 0 ||
        rte_eth_rx_queue_setup(port, 0, 256, SOCKET_ID_ANY, NULL, pool) != 0 ||
        rte_eth_tx_queue_setup(port, 0, 256, SOCKET_ID_ANY, NULL) != 0 || rte_eth_dev_start(port) != 0)
        stop("the port cannot be started");
    struct rte_ether_addr ours, theirs = {{0x02, 0, 0, 0, 0, 0x01}};
    rte_eth_macaddr_get(port, &ours);

    uint32_t sent = 0, received = 0;
    uint64_t end = rte_get_timer_cycles() + SECONDS * rte_get_timer_hz();
    while (received < count) {
        if (sent < count && sent - received < WINDOW) {
            struct rte_mbuf *mbuf = rte_pktmbuf_alloc(pool);
            if (mbuf == NULL)
                stop("no free frame");
            uint8_t *frame = (uint8_t *)rte_pktmbuf_append(mbuf, (uint16_t)length(sent));
            rte_ether_addr_copy(&theirs, (struct rte_ether_addr *)frame);
            rte_ether_addr_copy(&ours, (struct rte_ether_addr *)(frame + 6));
            fill(frame, sent);
            if (rte_eth_tx_burst(port, 0, &mbuf, 1) == 1)
                sent++;
            else
                rte_pktmbuf_free(mbuf);
        }
        struct rte_mbuf *mbufs[WINDOW];
        uint16_t got = rte_eth_rx_burst(port, 0, mbufs, WINDOW);
        for (uint16_t i = 0; i < got; i++) {
            const uint8_t *frame = rte_pktmbuf_mtod(mbufs[i], const uint8_t *);
            if (mbufs[i]->nb_segs != 1 || differs(frame, mbufs[i]->data_len, received)) {
                fprintf(stderr, "frame %" PRIu32 "\n", received);
                stop("a frame has changed, or is out of order");
            }
            rte_pktmbuf_free(mbufs[i]);
            received++;
        }
        if (rte_get_timer_cycles() > end) {
            fprintf(stderr, "%" PRIu32 " sent, %" PRIu32 " received\n", sent, received);
            stop("not all frames came back in time");
        }
    }
    printf("%" PRIu32 " frames came back\n", received);
    rte_eth_dev_stop(port);
    rte_eth_dev_close(port);
    return 0;
}
