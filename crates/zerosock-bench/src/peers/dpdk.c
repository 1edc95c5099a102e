/*
 * A program on DPDK's ethernet devices, for the benchmarks. Arguments: those of the EAL, `--`, and
 * one of
 *
 *   forward                      frames of each of two ports leave by the other one
 *   echo                         frames of one port leave by the same port
 *   generate BYTES WARM-MS MS    sends frames of BYTES by the first port, receives them from the last
 *                                one, which may be the same, and prints how many arrived
 *
 * It polls until it is killed; `generate` ends by itself.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <rte_cycles.h>
#include <rte_eal.h>
#include <rte_ethdev.h>
#include <rte_mbuf.h>

#define BURST 32
#define DESCRIPTORS 256
#define MBUFS 8191
#define CACHE 256
/* Frames in flight at most; a frame that is lost leaves after a second. */
#define WINDOW 192

static struct rte_mempool *pool;

static void fail(const char *what, int code)
{
	fprintf(stderr, "%s: %s\n", what, rte_strerror(code < 0 ? -code : code));
	exit(1);
}

static void start(uint16_t port)
{
	struct rte_eth_conf conf;
	int code;

	memset(&conf, 0, sizeof(conf));
	code = rte_eth_dev_configure(port, 1, 1, &conf);
	if (code == 0)
		code = rte_eth_rx_queue_setup(port, 0, DESCRIPTORS, 0, NULL, pool);
	if (code == 0)
		code = rte_eth_tx_queue_setup(port, 0, DESCRIPTORS, 0, NULL);
	if (code == 0)
		code = rte_eth_dev_start(port);
	if (code != 0)
		fail("a port", code);
	rte_eth_promiscuous_enable(port);
}

/* Sends what there is room for and frees the rest. */
static uint16_t transmit(uint16_t port, struct rte_mbuf **frames, uint16_t count)
{
	uint16_t sent = rte_eth_tx_burst(port, 0, frames, count);

	if (sent < count)
		rte_pktmbuf_free_bulk(frames + sent, count - sent);
	return sent;
}

static void forward(uint16_t ports)
{
	struct rte_mbuf *frames[BURST];

	for (;;) {
		for (uint16_t port = 0; port < ports; port++) {
			uint16_t count = rte_eth_rx_burst(port, 0, frames, BURST);

			if (count > 0)
				transmit(ports == 1 ? port : 1 - port, frames, count);
		}
	}
}

static uint16_t send_new(uint16_t size, uint16_t room)
{
	struct rte_mbuf *frames[BURST];
	uint16_t count = room < BURST ? room : BURST;

	if (count == 0 || rte_pktmbuf_alloc_bulk(pool, frames, count) != 0)
		return 0;
	for (uint16_t at = 0; at < count; at++)
		memset(rte_pktmbuf_append(frames[at], size), at, size);
	return transmit(0, frames, count);
}

/* The sum of the bytes of a frame: its receiver reads them. */
static uint64_t read_frame(const struct rte_mbuf *frame)
{
	const uint64_t *words = rte_pktmbuf_mtod(frame, const uint64_t *);
	uint64_t sum = 0;

	for (uint16_t at = 0; at < frame->data_len / 8; at++)
		sum += words[at];
	return sum;
}

static void generate(uint16_t from, uint16_t size, uint64_t warm_ms, uint64_t ms)
{
	const uint64_t hz = rte_get_timer_hz();
	uint64_t now = rte_get_timer_cycles(), begin = 0, last = now, arrived = 0, sum = 0;
	uint64_t limit = now, give_up = now + 20 * hz;
	uint32_t in_flight = 0;
	struct rte_mbuf *frames[BURST];

	for (;;) {
		uint16_t count = rte_eth_rx_burst(from, 0, frames, BURST);

		now = rte_get_timer_cycles();
		if (count > 0) {
			for (uint16_t at = 0; at < count; at++)
				sum += read_frame(frames[at]);
			rte_pktmbuf_free_bulk(frames, count);
			in_flight -= count < in_flight ? count : in_flight;
			last = now;
			if (begin == 0) {
				/* The warm-up begins with the first frame that arrives. */
				begin = now + warm_ms * hz / 1000;
				limit = begin + ms * hz / 1000;
				give_up = limit + 20 * hz;
			} else if (now >= begin) {
				arrived += count;
			}
		} else if (now - last > hz / 100) {
			in_flight = 0;
			last = now;
		}
		if ((arrived > 0 && now >= limit) || now >= give_up)
			break;
		in_flight += send_new(size, WINDOW - in_flight);
	}
	if (arrived == 0) {
		fprintf(stderr, "no frame came back in 20 s\n");
		exit(1);
	}
	printf("frames %" PRIu64 " nanoseconds %" PRIu64 " sum %" PRIu64 "\n", arrived,
	       (uint64_t)((now - begin) * 1e9 / hz), sum);
	fflush(stdout);
}

int main(int argc, char **argv)
{
	int used = rte_eal_init(argc, argv);
	uint16_t ports;

	if (used < 0)
		fail("EAL", rte_errno);
	argc -= used;
	argv += used;
	pool = rte_pktmbuf_pool_create("frames", MBUFS, CACHE, 0, RTE_MBUF_DEFAULT_BUF_SIZE, 0);
	if (pool == NULL)
		fail("a pool", rte_errno);
	ports = rte_eth_dev_count_avail();
	for (uint16_t port = 0; port < ports; port++)
		start(port);
	if (argc == 2 && strcmp(argv[1], "forward") == 0 && ports == 2)
		forward(2);
	else if (argc == 2 && strcmp(argv[1], "echo") == 0 && ports == 1)
		forward(1);
	else if (argc == 5 && strcmp(argv[1], "generate") == 0 && ports > 0)
		generate(ports - 1, atoi(argv[2]), atoi(argv[3]), atoi(argv[4]));
	else
		fail("arguments", EINVAL);
	return 0;
}
