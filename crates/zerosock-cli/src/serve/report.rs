//! The counters in the log: at SIGUSR1, when `serve` stops, and of rules that a reload removes.

use std::collections::BTreeMap;

use tracing::info;
use zerosock::Cid;
use zerosock::access::AccessList;
use zerosock::daemon::{Daemon, Stats};
use zerosock::forward::RuleStats;

use super::settings::Settings;

/// Logs the counters of each VM, process and rule. Returns the sums.
pub(super) fn report(daemon: &Daemon, settings: &Settings) -> Stats {
    report_endpoints(daemon);
    daemon.forward_stats().iter().for_each(report_rule);
    report_denied(&settings.rules);
    daemon.stats()
}

fn report_endpoints(daemon: &Daemon) {
    let processes = daemon.processes().into_iter();
    let named = processes.filter(|process| !process.is_service());
    let named = named.map(|process| (process.cid, process.name));
    let guests = daemon.guest_endpoints().into_iter();
    let names: BTreeMap<Cid, _> = named
        .chain(guests.map(|endpoint| (endpoint.cid, endpoint.name)))
        .filter_map(|(cid, name)| Some((cid, name?)))
        .collect();
    for (cid, traffic) in daemon.endpoint_traffic() {
        info!(
            %cid,
            name = names.get(&cid).map(tracing::field::display),
            connections = traffic.connections,
            connections_now = traffic.connections_now,
            refused = traffic.refused,
            from_endpoint = traffic.rx_bytes,
            to_endpoint = traffic.tx_bytes,
            in_place_bytes = traffic.in_place_bytes,
            copied_bytes = traffic.copied_bytes,
            bad_packets = traffic.bad_packets,
            datagrams_dropped = traffic.datagrams_dropped,
            "counters of an endpoint"
        );
    }
}

/// Logs the counters of a forwarding rule.
pub(super) fn report_rule(stats: &RuleStats) {
    info!(
        rule = stats.rule,
        removed = stats.removed,
        active = stats.active,
        opened = stats.opened,
        refused = stats.refused,
        sent = stats.bytes_sent,
        received = stats.bytes_received,
        datagrams_dropped = stats.datagrams_dropped,
        "connections of a rule"
    );
}

/// Logs how many connections and datagrams each rule of the access list has denied.
pub(super) fn report_denied(rules: &AccessList) {
    let counted = rules.rules().iter().zip(rules.denied()).enumerate();
    for (index, (rule, denied)) in counted.filter(|(_, (_, denied))| *denied > 0) {
        match &rule.name {
            Some(name) => info!("access {name} has denied {denied} connections and datagrams"),
            None => info!("access[{index}] has denied {denied} connections and datagrams"),
        }
    }
}

/// Logs the sums of all workers, with `message`.
pub(super) fn report_sums(stats: &Stats, message: &str) {
    info!(
        in_place_bytes = stats.in_place_bytes,
        zero_copy_bytes = stats.zero_copy_bytes,
        copied_bytes = stats.copied_bytes,
        connections = stats.conns_added,
        connections_now = stats.connections_now,
        bridges_now = stats.bridges_now,
        timers_now = stats.timers_now,
        ports_now = stats.ports_now,
        refused = stats.conns_refused,
        refused_denied = stats.refused_denied,
        refused_no_listener = stats.refused_no_listener,
        refused_backlog_full = stats.refused_backlog_full,
        refused_unreachable = stats.refused_unreachable,
        refused_by_endpoint = stats.refused_by_endpoint,
        refused_by_limit = stats.refused_by_limit,
        refused_other = stats.refused_other,
        bad_packets = stats.bad_packets,
        bad_chains = stats.bad_chains,
        bad_handshakes = stats.bad_handshakes,
        overflow_resets = stats.overflow_resets,
        message_resets = stats.message_resets,
        datagrams_dropped = stats.datagrams_dropped,
        devices_lost = stats.devices_lost,
        control_faults = stats.control_faults,
        attach_refused = stats.attach_refused,
        guest_endpoints = stats.guest_endpoints,
        guest_registered = stats.guest_registered,
        guest_page_failures = stats.guest_page_failures,
        guest_refused = stats.guest_refused,
        descriptors_refused = stats.descriptors_refused,
        reaper_stuck = stats.reaper_stuck,
        reaper_pending = stats.reaper_pending,
        "{message}"
    );
}
