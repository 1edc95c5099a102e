//! Scenarios between a guest and the host.

mod bulk;
mod closing;
mod credit;
mod datagrams;
pub(crate) mod guide;
mod hybrid_messages;
mod life;
mod messages_in_place;
pub(crate) mod perf;
mod refusal;
mod relay;
mod seqpacket;
mod services;
mod sockmap;
mod zero_copy;

use crate::Scenario;

/// Scenarios with Linux 6.1 that need QEMU, or a kernel that is newer than that of Debian's user-mode Linux, whose
/// loopback vsock closes a connection only after 30 s.
const NEED_QEMU: &[&str] = &[
    "qemu_guest_agent",
    "forward_to_kernel_vsock",
    "reboot",
    "front_end_killed",
];

/// All scenarios that user-mode Linux 6.1 can run, or the others.
pub(crate) fn by_user_mode(can: bool) -> impl Iterator<Item = &'static (&'static str, Scenario)> {
    ALL.iter()
        .filter(move |(name, _)| NEED_QEMU.contains(name) != can)
}

/// All scenarios in order: those that end guests come last.
pub(crate) const ALL: &[(&str, Scenario)] = &[
    ("to_host", bulk::to_host),
    ("to_guest", bulk::to_guest),
    ("both_directions_on_one_connection", bulk::both),
    ("hundred_connections_at_once", bulk::hundred),
    ("guest_shuts_sending", closing::guest_shuts_sending),
    ("host_shuts_sending", closing::host_shuts_sending),
    ("guest_shuts_receiving", closing::guest_shuts_receiving),
    ("host_shuts_receiving", closing::host_shuts_receiving),
    ("nothing_is_lost_at_close", closing::nothing_is_lost),
    ("host_refuses", refusal::host_refuses),
    ("guest_refuses", refusal::guest_refuses),
    ("seqpacket_guest_is_client", seqpacket::guest_is_client),
    ("seqpacket_guest_is_server", seqpacket::guest_is_server),
    (
        "seqpacket_guest_calls_a_host_program",
        hybrid_messages::guest_is_client,
    ),
    (
        "seqpacket_a_host_program_calls_the_guest",
        hybrid_messages::guest_is_server,
    ),
    (
        "seqpacket_netcat_in_the_guest",
        hybrid_messages::netcat_in_the_guest,
    ),
    ("owned_buffers_over_kernel_vsock", zero_copy::to_host),
    ("owned_buffers_over_tcp", zero_copy::over_tcp),
    ("owned_buffers_over_kernel_tls", zero_copy::encrypted),
    (
        "owned_messages_over_kernel_vsock_are_refused",
        zero_copy::messages_are_refused,
    ),
    (
        "seqpacket_in_place_with_the_embedding_program",
        messages_in_place::with_the_embedding_program,
    ),
    ("stalled_host_reader", credit::stalled_host_reader),
    ("stalled_guest_reader", credit::stalled_guest_reader),
    ("receive_low_water", credit::receive_low_water),
    ("small_packets_to_host", credit::small_packets_to_host),
    ("small_packets_to_guest", credit::small_packets_to_guest),
    ("qemu_guest_agent", life::qemu_guest_agent),
    ("forward_to_kernel_vsock", life::forward),
    ("siblings", life::siblings),
    (
        "services_and_the_hybrid_socket",
        services::two_and_the_hybrid_socket,
    ),
    (
        "datagrams_of_attached_processes",
        datagrams::of_attached_processes,
    ),
    (
        "datagrams_of_the_embedding_program",
        datagrams::of_the_embedding_program,
    ),
    ("sockmap_contents_virtio", sockmap::contents_virtio),
    ("sockmap_contents_loopback", sockmap::contents_loopback),
    ("relay_in_the_guest_auto", relay::auto),
    ("relay_in_the_guest_copy", relay::copy),
    ("relay_in_the_guest_splice", relay::splice),
    ("relay_in_the_guest_sockmap", relay::sockmap),
    (
        "relay_in_the_guest_sockmap_unprivileged",
        relay::sockmap_unprivileged,
    ),
    ("guide_fetch_a_page", guide::fetch_a_page),
    ("guide_serve_a_page", guide::serve_a_page),
    ("guide_ask_a_name_server", guide::ask_a_name_server),
    ("perf_guest_is_server", perf::guest_is_server),
    ("perf_guest_is_client", perf::guest_is_client),
    ("perf_from_a_guest_of_its_own", perf::from_own_guest),
    ("perf_to_a_guest_of_its_own", perf::to_own_guest),
    ("reboot", life::reboot),
    ("front_end_killed", life::front_end_killed),
];
