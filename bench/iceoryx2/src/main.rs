//! iceoryx2's publish-subscribe as a contestant of `zerosock-bench`: one side of a pair.
//!
//! It takes the same orders and runs the same loops as every other contestant; the folder with
//! them is that of the harness. Samples are loaned uninitialised, written in place, read in place.
//! Both sides spin. Nothing is dropped: safe overflow is off, a full subscriber makes the
//! publisher try again until it is delivered.
#![forbid(unsafe_code)]

#[allow(
    dead_code,
    reason = "the loops of all contestants; this one has its part of them"
)]
#[path = "../../../crates/zerosock-bench/src/worker/mod.rs"]
mod worker;

use std::hint::spin_loop;
use std::process::ExitCode;

use iceoryx2::port::publisher::Publisher;
use iceoryx2::port::subscriber::Subscriber;
use iceoryx2::prelude::{
    BackpressureStrategy, LogLevel, Node, NodeBuilder, SignalHandlingMode, ipc, set_log_level,
};

use worker::Link;
use worker::order::Order;
use worker::touch::{Check, Fault, Message, Seen};

/// The unit of a sample: eight bytes.
type Lane = u64;
/// Bytes of all samples on their way, as far as that makes between 4 and 4096 of them: of those
/// tried, from 16 to 4096 samples, what each size gains most by.
const BUFFER_BYTES: usize = 1 << 20;

fn main() -> ExitCode {
    set_log_level(LogLevel::Error);
    let words: Vec<String> = std::env::args().skip(1).collect();
    let outcome = words.join(" ").parse().and_then(|order| run(&order));
    if worker::report_fault(outcome) {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn run(order: &Order) -> Result<(), Fault> {
    if order.size % size_of::<Lane>() != 0 {
        return Err(format!("{} bytes are no whole lanes", order.size));
    }
    worker::pin(order.cpu)?;
    // The node handles no signals: the harness ends this process by closing its standard input.
    let node = NodeBuilder::new()
        .signal_handling_mode(SignalHandlingMode::Disabled)
        .create::<ipc::Service>()
        .map_err(|error| format!("node: {error}"))?;
    let one_way = order.job.is_one_way();
    let mut link = Samples {
        publisher: None,
        subscriber: None,
    };
    // The side that is there first makes all services; each name is used by one run alone.
    if order.job.is_open() {
        link.subscriber = Some(subscriber(&node, order, "there")?);
        if !one_way {
            link.publisher = Some(publisher(&node, order, "back")?);
        }
        worker::announce_open(&order.place)?;
    } else {
        if !one_way {
            link.subscriber = Some(subscriber(&node, order, "back")?);
        }
        link.publisher = Some(publisher(&node, order, "there")?);
    }
    worker::work(&mut link, order)
}

struct Samples {
    publisher: Option<Publisher<ipc::Service, [Lane], ()>>,
    subscriber: Option<Subscriber<ipc::Service, [Lane], ()>>,
}

type Service =
    iceoryx2::service::port_factory::publish_subscribe::PortFactory<ipc::Service, [Lane], ()>;

fn service(node: &Node<ipc::Service>, order: &Order, way: &str) -> Result<Service, Fault> {
    let place = order.to.as_deref().unwrap_or(&order.place);
    let name = format!("zerosock-bench {place} {way}");
    let name = name.as_str().try_into();
    let name = name.map_err(|error| format!("service name: {error:?}"))?;
    node.service_builder(&name)
        .publish_subscribe::<[Lane]>()
        .enable_safe_overflow(false)
        .history_size(0)
        .subscriber_max_buffer_size(samples(order))
        .subscriber_max_borrowed_samples(1)
        .max_publishers(1)
        .max_subscribers(1)
        .max_nodes(2)
        .open_or_create()
        .map_err(|error| format!("service: {error:?}"))
}

fn samples(order: &Order) -> usize {
    (BUFFER_BYTES / order.size).clamp(4, 4096)
}

fn publisher(
    node: &Node<ipc::Service>,
    order: &Order,
    way: &str,
) -> Result<Publisher<ipc::Service, [Lane], ()>, Fault> {
    service(node, order, way)?
        .publisher_builder()
        .initial_max_slice_len(order.size / size_of::<Lane>())
        .max_loaned_samples(1)
        .backpressure_strategy(BackpressureStrategy::RetryUntilDelivered)
        .create()
        .map_err(|error| format!("publisher: {error:?}"))
}

fn subscriber(
    node: &Node<ipc::Service>,
    order: &Order,
    way: &str,
) -> Result<Subscriber<ipc::Service, [Lane], ()>, Fault> {
    service(node, order, way)?
        .subscriber_builder()
        .buffer_size(samples(order))
        .create()
        .map_err(|error| format!("subscriber: {error:?}"))
}

impl Link for Samples {
    fn send(&mut self, message: Message) -> Result<(), Fault> {
        let publisher = self.publisher.as_ref().ok_or_else(one_way)?;
        loop {
            let sample = publisher
                .loan_slice_uninit(message.len / size_of::<Lane>())
                .map_err(|error| format!("loan: {error:?}"))?;
            let delivered = sample
                .write_from_fn(|index| message.lane(index as u64).to_le())
                .send()
                .map_err(|error| format!("send: {error:?}"))?;
            // Seen when both sides are preempted often: although it is to try again until
            // delivered, it sometimes gives up. The sample went nowhere, so another is sent.
            if delivered > 0 {
                return Ok(());
            }
        }
    }

    fn recv(&mut self, mut check: Check) -> Result<Seen, Fault> {
        let subscriber = self.subscriber.as_ref().ok_or_else(one_way)?;
        loop {
            let sample = subscriber.receive();
            match sample.map_err(|error| format!("receive: {error:?}"))? {
                Some(sample) => {
                    check.part(bytemuck::cast_slice(sample.payload()));
                    return check.finish();
                }
                None => spin_loop(),
            }
        }
    }
}

fn one_way() -> Fault {
    "a one-way link was used both ways".to_owned()
}
