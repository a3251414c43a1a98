//! Residency against the best choice in hindsight.

use super::super::simulation::Layer;
use super::super::traffic::{Random, popularity, route};
use super::*;
use proptest::prelude::*;

const LAYER: Layer = Layer::new(128, 2048, 768, 8);

fn residency(share: f64) -> Residency {
    let bytes = (LAYER.geometry.bank_bytes() as f64 * share) as u64;
    Residency::new(&LAYER.geometry, bytes, ResidencySettings::default()).unwrap()
}

/// Popularity by Zipf's law, of experts in an order that `shift` turns.
fn zipf(shift: usize) -> Vec<f64> {
    let mut popularity = popularity(LAYER.geometry.experts, 1.1);
    popularity.rotate_right(shift);
    popularity
}

/// Runs decodes; the share of expert uses that were resident, and the experts moved.
fn decode(
    residency: &mut Residency,
    random: &mut Random,
    popularity: &[f64],
    forwards: usize,
) -> (f64, usize) {
    let (mut hits, mut uses, mut moved) = (0, 0, 0);
    for _ in 0..forwards {
        let rows = route(random, popularity, 1, LAYER.top_k);
        let loads: Vec<(u32, u32)> = (0..).zip(rows).filter(|(_, rows)| *rows > 0).collect();
        uses += loads.len();
        hits += loads
            .iter()
            .filter(|(e, _)| residency.is_resident(*e))
            .count();
        residency.record(Phase::Decode, loads);
        let moves = residency.plan();
        assert!(moves.len() <= ResidencySettings::default().moves_per_forward);
        moved += moves.len();
    }
    (hits as f64 / uses as f64, moved)
}

/// The share of uses that the most popular experts get.
fn optimum(random: &mut Random, popularity: &[f64], experts: usize) -> f64 {
    let mut order: Vec<usize> = (0..popularity.len()).collect();
    order.sort_by(|&a, &b| popularity[b].total_cmp(&popularity[a]));
    order.truncate(experts);
    let (mut hits, mut uses) = (0, 0);
    for _ in 0..2000 {
        let rows = route(random, popularity, 1, LAYER.top_k);
        for (expert, rows) in rows.into_iter().enumerate() {
            uses += usize::from(rows > 0);
            hits += usize::from(rows > 0 && order.contains(&expert));
        }
    }
    f64::from(hits as u32) / f64::from(uses as u32)
}

#[test]
fn a_quarter_of_the_experts_serves_nearly_all_that_it_could_and_stays() {
    let mut random = Random(3);
    let popularity = zipf(37);
    let mut residency = residency(0.25);
    let capacity = residency.capacity();
    assert!((31..=32).contains(&capacity), "{capacity}");
    decode(&mut residency, &mut random, &popularity, 2000);
    assert_eq!(residency.residents().count(), capacity);
    let (hits, moved) = decode(&mut residency, &mut random, &popularity, 3000);
    let best = optimum(&mut random, &popularity, capacity);
    println!("hits {hits:.3} of at most {best:.3}, {moved} moves in 3000 forwards");
    assert!(hits > 0.96 * best, "{hits} against {best}");
    assert!(moved <= 60, "{moved} moves in 3000 forwards");
}

#[test]
fn residents_follow_traffic_that_changes() {
    let mut random = Random(4);
    let mut residency = residency(0.25);
    decode(&mut residency, &mut random, &zipf(0), 2000);
    let changed = zipf(64);
    let (at_first, _) = decode(&mut residency, &mut random, &changed, 50);
    decode(&mut residency, &mut random, &changed, 3000);
    let (later, _) = decode(&mut residency, &mut random, &changed, 1000);
    let best = optimum(&mut random, &changed, residency.capacity());
    assert!(
        at_first < 0.5 * best && later > 0.93 * best,
        "{at_first}, {later}, {best}"
    );
}

/// Prompts that touch every expert alike leave the decodes' favourites where they are.
#[test]
fn prefills_do_not_drown_decodes() {
    let mut random = Random(5);
    let popularity = zipf(0);
    let mut residency = residency(0.25);
    decode(&mut residency, &mut random, &popularity, 1500);
    let before: Vec<u32> = residency.residents().collect();
    let flat = vec![1.0 / 128.0; 128];
    for _ in 0..50 {
        let rows = route(&mut random, &flat, 4096, 8);
        residency.record(Phase::Prefill, (0..).zip(rows));
        residency.plan();
    }
    let kept = before.iter().filter(|&&e| residency.is_resident(e)).count();
    assert!(kept * 10 >= before.len() * 8, "{kept} of {}", before.len());
}

#[test]
fn a_prefill_alone_ranks_by_rows() {
    let mut residency = residency(2.5 / 128.0);
    assert_eq!(residency.capacity(), 2);
    residency.record(Phase::Prefill, [(3, 10), (70, 500), (9, 300), (500, 1000)]);
    let moves = residency.plan();
    let admitted: Vec<u32> = moves.iter().map(|m| m.admit).collect();
    assert_eq!(admitted, [70, 9]);
    assert!(moves.iter().all(|m| m.evict.is_none()));
    assert!(residency.plan().is_empty());
}

#[test]
fn budgets_of_nothing_and_of_everything() {
    let mut none = residency(0.0);
    none.record(Phase::Decode, [(1, 1)]);
    assert!(none.plan().is_empty());
    let mut all = residency(1.0);
    assert_eq!(all.capacity(), 128);
    all.record(Phase::Decode, (0..128).map(|expert| (expert, 1)));
    let moved: usize = (0..100).map(|_| all.plan().len()).sum();
    assert_eq!(moved, 128);
    assert_eq!(all.resident_bytes(), LAYER.geometry.bank_bytes() as u64);
    let evicted = all.set_budget(LAYER.geometry.expert_bytes() as u64 * 3);
    assert_eq!((evicted.len(), all.residents().count()), (125, 3));
}

#[test]
fn a_move_that_failed_can_be_tried_again() {
    let mut residency = residency(1.5 / 128.0);
    residency.record(Phase::Decode, [(5, 1)]);
    let moves = residency.plan();
    assert_eq!(
        moves,
        [Move {
            evict: None,
            admit: 5
        }]
    );
    residency.undo(moves[0]);
    residency.undo(moves[0]);
    assert_eq!(residency.resident_bytes(), 0);
    assert_eq!(residency.plan(), moves);
}

#[test]
fn settings_are_checked_by_name() {
    let make = |settings| Residency::new(&LAYER.geometry, 0, settings).unwrap_err();
    let default = ResidencySettings::default();
    let error = make(ResidencySettings {
        decode_decay: 1.0,
        ..default
    });
    assert!(
        error.to_string().starts_with("decode_decay is 1, "),
        "{error}"
    );
    let error = make(ResidencySettings {
        decode_weight: f64::NAN,
        ..default
    });
    assert!(error.to_string().contains("decode_weight"), "{error}");
    let error = make(ResidencySettings {
        margin: 0.5,
        ..default
    });
    assert!(error.to_string().contains("at least 1"), "{error}");
}

#[test]
fn profiles_carry_the_counts_by_layer_name() {
    let mut random = Random(6);
    let mut trained = residency(0.25);
    decode(&mut trained, &mut random, &zipf(11), 800);
    let mut profiles = Profiles::default();
    profiles
        .layers
        .insert("model.layers.3".into(), trained.profile());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("profile.json");
    profiles.save(&path).unwrap();
    let loaded = Profiles::load(&path).unwrap();
    let layer = loaded.layer("model.layers.3").unwrap();
    let error = loaded.layer("model.layers.4").unwrap_err();
    assert!(error.to_string().contains("model.layers.4"));

    let mut fresh = residency(0.25);
    fresh.apply(layer).unwrap();
    while !fresh.plan().is_empty() {}
    let kept = fresh
        .residents()
        .filter(|&e| trained.is_resident(e))
        .count();
    assert!(
        kept * 10 >= fresh.capacity() * 8,
        "{kept} of {}",
        fresh.capacity()
    );

    let short = LayerProfile {
        decode: vec![1.0; 3],
        prefill: vec![1.0; 128],
    };
    let error = fresh.apply(&short).unwrap_err();
    assert_eq!(
        error,
        ResidencyError::Experts {
            found: 3,
            expected: 128
        }
    );
    let mut wrong = layer.clone();
    wrong.prefill[7] = -1.0;
    assert_eq!(
        fresh.apply(&wrong).unwrap_err(),
        ResidencyError::Count {
            expert: 7,
            value: -1.0
        }
    );
    std::fs::write(&path, "{\"layers\": 3}").unwrap();
    assert!(
        Profiles::load(&path)
            .unwrap_err()
            .to_string()
            .contains("profile.json")
    );
}

proptest! {
    /// Whatever is routed, moves keep the books: no expert twice, never more than fit.
    #[test]
    fn moves_keep_the_books(
        budget in 0usize..20,
        forwards in proptest::collection::vec(
            (any::<bool>(), proptest::collection::vec((0u32..20, 0u32..50), 0..8)), 1..60),
    ) {
        let geometry = Layer::new(16, 128, 128, 2).geometry;
        let bytes = (geometry.expert_bytes() * budget) as u64;
        let mut residency = Residency::new(&geometry, bytes, ResidencySettings::default()).unwrap();
        let mut cached = std::collections::BTreeSet::new();
        for (prefill, loads) in forwards {
            let phase = if prefill { Phase::Prefill } else { Phase::Decode };
            residency.record(phase, loads);
            for Move { evict, admit } in residency.plan() {
                if let Some(evict) = evict {
                    prop_assert!(cached.remove(&evict));
                }
                prop_assert!(cached.insert(admit));
                prop_assert!(admit < 16 && cached.len() <= budget.min(16));
            }
            prop_assert!(residency.residents().eq(cached.iter().copied()));
        }
    }
}
