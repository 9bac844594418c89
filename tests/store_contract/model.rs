//! Random operations on the table and on the reference store: the same replies, whoever of the workers asks.

use idempotency::clock::Timestamp;
use idempotency::config::{OnAbandoned, WhenFull};
use idempotency::fingerprint::Fingerprint;
use idempotency::record::Reason;
use idempotency::store::Write;
use proptest::prelude::*;

use crate::fake_cas::FakeCas;
use crate::operation::{LEASE, LIFE, Operation, claim, complete, response, write};
use crate::reference::ReferenceStore;
use crate::{config, open};

#[derive(Debug, Clone)]
struct Turn {
    worker: usize,
    millis: u64,
    operation: Operation,
}

fn any_operation() -> impl Strategy<Value = Operation> {
    let (key, owner) = (0u64..12, 0u64..4);
    let reason = proptest::sample::select(Reason::ALL.to_vec());
    prop_oneof![
        4 => (key.clone(), owner.clone(), 1u8..3, any::<bool>()).prop_map(|(key, owner, fingerprint, takeover)| {
            let Operation::Claim(mut claim) = claim(key, owner) else { unreachable!() };
            claim.terms.fingerprint = Fingerprint::from_bytes([fingerprint; 32]);
            claim.terms.on_abandoned = if takeover { OnAbandoned::Takeover } else { OnAbandoned::Retain };
            Operation::Claim(claim)
        }),
        3 => (key.clone(), owner.clone(), 0usize..400).prop_map(|(key, owner, length)| {
            complete(key, owner, &response(owner, length))
        }),
        1 => (key.clone(), owner.clone()).prop_map(|(key, owner)| {
            write(key, owner, Write::Renew { lock_ttl: LEASE, record_ttl: LIFE })
        }),
        1 => (key.clone(), owner.clone(), reason).prop_map(|(key, owner, reason)| {
            write(key, owner, Write::Fail { reason, failed_ttl: LIFE })
        }),
        1 => (key, owner).prop_map(|(key, owner)| write(key, owner, Write::Release)),
    ]
}

fn any_turn() -> impl Strategy<Value = Turn> {
    let millis = prop_oneof![6 => 0u64..20_000, 2 => 0u64..100_000, 1 => Just(LIFE.as_millis() as u64)];
    (0usize..3, millis, any_operation()).prop_map(|(worker, millis, operation)| Turn {
        worker,
        millis,
        operation,
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]
    #[test]
    fn the_table_replies_as_the_reference_does(
        turns in proptest::collection::vec(any_turn(), 1..150),
        max_records in proptest::sample::select(vec![12u32, 64, 100]),
    ) {
        let cas = FakeCas::default();
        let config = config(max_records, 1 << 20, WhenFull::Reject);
        let mut workers = [(); 3].map(|()| open(&cas, &config));
        let mut reference = ReferenceStore::default();
        let mut now = 1_000_000;
        for turn in turns {
            now += turn.millis;
            let now = Timestamp::from_millis(now);
            let expected = turn.operation.run(&mut reference, now);
            let found = turn.operation.run(&mut workers[turn.worker], now);
            prop_assert_eq!(found, expected, "{:?}", turn);
        }
        prop_assert!(cas.peak_bytes() <= config.max_bytes);
    }
}
