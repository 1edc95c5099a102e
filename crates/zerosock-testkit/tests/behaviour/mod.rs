//! Behaviours that programs expect of vsock: one list, by name, tested between two sides.
//!
//! A side can make the calls of [`zerosock_testkit::protocol`]: the library's sockets in this
//! process, or the kernel's in a guest. Each behaviour is a script over a client and a server,
//! independent of their kinds; one that only some sides support is skipped with the reason.
//!
//! # Invariants
//! - A behaviour leaves no socket behind that could affect another one, and uses a new port.
//! - It waits for events, never for time to pass (except where that is tested).
#![allow(dead_code, reason = "each test program uses its own part")]

mod buffers;
mod bytes;
mod closing;
mod connecting;
pub(crate) mod library;
mod records;
pub(crate) mod side;
pub(crate) mod table;
mod zero_copy;

#[allow(unused_imports, reason = "each test program uses its own part")]
pub(crate) use side::{Pair, Side, Skip, Started, Verdict};

/// A behaviour; see the module.
pub(crate) struct Behaviour {
    /// Name in the list.
    pub(crate) name: &'static str,
    /// The sides that it needs.
    pub(crate) with: With,
    /// Tests it; panics on failure.
    run: fn(&Pair) -> Verdict,
}

/// Sides that a behaviour needs.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) enum With {
    /// Any two.
    Any,
    /// A client with kernel sockets: the library has no such call.
    KernelClient,
    /// A server with kernel sockets.
    KernelServer,
}

macro_rules! behaviours {
    (
        $any:ident { $($room:ident: $($name:ident),* $(,)?;)* }
        $($with:ident { $($of:ident: $($kernel:ident),* $(,)?;)* })*
    ) => {
        /// All behaviours.
        pub(crate) const ALL: &[Behaviour] = &[
            $($(Behaviour {
                name: stringify!($name),
                with: With::$any,
                run: $room::$name,
            },)*)*
            $($($(Behaviour {
                name: stringify!($kernel),
                with: With::$with,
                run: $of::$kernel,
            },)*)*)*
        ];

        /// One test for each behaviour that the library's sockets support, in the setting that
        /// `$setting` makes.
        #[allow(unused_macros, reason = "each test program uses its own part")]
        macro_rules! each_behaviour {
            ($setting:path) => {
                $($(
                    #[test]
                    fn $name() {
                        $setting(stringify!($name));
                    }
                )*)*
            };
        }
        #[allow(unused_imports, reason = "each test program uses its own part")]
        pub(crate) use each_behaviour;
    };
}

behaviours! {
    Any {
        connecting:
            connection_reset_to_no_listener,
            connection_reset_to_a_port_that_is_only_bound,
            hundred_connections_at_once,
            retry_after_a_failed_connect,
            chosen_source_port,
            same_source_port_after_close,
            a_taken_port_cannot_be_bound,
            a_port_that_is_free_to_listen_on,
            an_own_address_is_bound_and_no_other,
            a_port_is_listened_on_again_beside_its_connections,
            closing_a_listener_resets_the_connections_in_its_backlog,
            options_set_before_connecting_stay,
            no_more_wait_than_the_backlog,
            connects_closed_at_once_leave_the_backlog_free;
        closing:
            client_closes_first,
            server_closes_first,
            shut_sending,
            shut_receiving,
            linger_until_the_peer_has_taken_all,
            linger_with_nothing_under_way,
            linger_of_no_time_resets;
        bytes:
            peek_at_nothing,
            peek_at_a_part,
            peek_at_all,
            peek_after_a_partial_receive,
            small_packets_and_partial_reads,
            poll_waits_for_the_low_water_mark,
            receive_time_out,
            unsent_and_unread_bytes;
        buffers:
            a_buffer_is_set_before_and_after_connecting,
            accepted_sockets_inherit,
            credit_update_at_the_low_water_mark,
            credit_update_without_a_low_water_mark,
            a_small_buffer_of_the_sender_bounds_what_is_queued,
            a_buffer_shrinks_under_way,
            small_packets_under_back_pressure,
            a_request_answered_in_tiny_packets;
        records:
            record_bounds,
            ends_of_records,
            truncated_record_tells_its_length,
            peek_at_records,
            poll_waits_for_a_record,
            record_receive_time_out,
            a_record_above_the_buffer_is_refused,
            records_end,
            connections_of_another_kind_are_refused,
            unsent_and_unread_bytes_of_records,
            small_records_under_back_pressure;
    }
    KernelClient {
        zero_copy:
            vectors_of_every_shape,
            records_without_a_copy,
            every_send_is_completed_once,
            completions_without_further_traffic,
            completions_while_the_reader_stalls,
            completions_while_the_reader_has_leases,
            a_stalled_reader_delays_no_other_completion,
            sends_complete_when_the_reader_closes,
            empty_error_queue_answers_at_once,
            unread_completions_leak_nothing,
            closing_before_completion_leaks_nothing;
    }
    KernelServer {
        bytes:
            bad_receive_buffer_keeps_the_bytes;
        records:
            bad_receive_buffer_loses_one_record;
    }
}

impl Behaviour {
    /// Tests it, and that docs/behaviours.md agrees on whether it can be tested.
    pub(crate) fn show(&self, pair: &Pair) -> Verdict {
        let verdict = (self.run)(pair);
        table::check(self.name, pair, pairs(), verdict.is_ok());
        verdict
    }
}

/// Queue pairs of devices and drivers: ZEROSOCK_TEST_PAIRS, or one.
pub(crate) fn pairs() -> u16 {
    let pairs = std::env::var("ZEROSOCK_TEST_PAIRS");
    pairs.map_or(1, |pairs| pairs.parse().expect("a number of pairs"))
}

/// Tests the behaviour called `name`; prints the reason if it is skipped.
pub(crate) fn show(name: &str, client: &dyn Side, server: &dyn Side) {
    let found = ALL.iter().find(|one| one.name == name);
    let one = found.expect("a name of the list");
    if let Err(Skip(reason)) = one.show(&Pair { client, server }) {
        println!("SKIPPED {name}: {reason}");
    }
}
