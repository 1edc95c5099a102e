//! The bounds of an answer, and the life of a lookup.

use super::*;

fn ips(texts: &[&str]) -> Vec<IpAddr> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

#[test]
fn an_answer_is_cut_to_16_addresses() {
    let all: Vec<IpAddr> = (0..100)
        .map(|last| IpAddr::from([192, 0, 2, last]))
        .collect();
    assert_eq!(bounded(all.clone()), all[..16]);
}

#[test]
fn an_address_counts_once_also_if_it_is_mapped() {
    let answer = ips(&[
        "192.0.2.1",
        "192.0.2.2",
        "192.0.2.1",
        "::ffff:192.0.2.2",
        "2001:db8::1",
    ]);
    assert_eq!(
        bounded(answer),
        ips(&["192.0.2.1", "192.0.2.2", "2001:db8::1"])
    );
}

#[test]
fn localhost_is_both_loopback_addresses() {
    let found = Found::localhost();
    assert_eq!(found.v4, Some(Ok(ips(&["127.0.0.1"]))));
    assert_eq!(found.v6, Some(Ok(ips(&["::1"]))));
}

#[cfg(feature = "names")]
#[test]
fn requests_for_one_name_share_a_lookup_that_ends_with_the_last_of_them() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        // A name server that never answers.
        let server = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let servers = vec![server.local_addr().unwrap()];
        let resolver = Resolver::new(System::new(
            servers,
            "/nonexistent".into(),
            "/nonexistent".into(),
        ));
        let name: DomainName = "one.example".parse().unwrap();
        let other: DomainName = "other.example".parse().unwrap();

        let receivers = [
            resolver.lookup(&name),
            resolver.lookup(&name),
            resolver.lookup(&other),
        ];
        assert_eq!(resolver.in_flight(), 2);
        let [first, second, third] = receivers;
        assert!(first.same_channel(&second));
        drop((first, third));
        while resolver.in_flight() == 2 {
            tokio::task::yield_now().await;
        }
        assert!(!second.has_changed().unwrap());
        drop(second);
        while resolver.in_flight() == 1 {
            tokio::task::yield_now().await;
        }
    });
}

#[cfg(not(feature = "names"))]
#[test]
fn without_the_feature_each_family_is_not_supported() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let resolver = Resolver::new(System::new(Vec::new(), "/x".into(), "/x".into()));
        let mut found = resolver.lookup(&"one.example".parse().unwrap());
        let all = |found: &Found| found.v4.is_some() && found.v6.is_some();
        let found = found.wait_for(all).await.unwrap();
        assert_eq!(found.v4, Some(Err(LookupError::NotSupported)));
        assert_eq!(found.v6, Some(Err(LookupError::NotSupported)));
    });
}
