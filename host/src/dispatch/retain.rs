//! The residency policy as a layer asks for it.

use super::residency::Residency;
use crate::moe::division::ExpertLoad;
use crate::moe::layer::Retain;

impl Retain for Residency {
    fn observe(&mut self, loads: &[ExpertLoad], tokens: u32) {
        let phase = self.phase_of(tokens as usize);
        self.record(phase, loads.iter().map(|load| (load.expert, load.rows)));
    }

    /// The experts that are to lie in the cache after this forward's moves, most used first.
    ///
    /// A move that the layer cannot make yet stays wanted; it is made when there is time for it.
    fn wanted(&mut self, cells: usize) -> Vec<u32> {
        self.set_capacity(cells);
        self.plan();
        let mut wanted: Vec<u32> = self.residents().collect();
        wanted.sort_by(|&a, &b| {
            self.score_of(b)
                .total_cmp(&self.score_of(a))
                .then(a.cmp(&b))
        });
        wanted
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dispatch::ResidencySettings;
    use crate::dispatch::simulation::Layer;

    #[test]
    fn what_is_wanted_fits_and_changes_little_by_little() {
        let geometry = Layer::new(16, 128, 128, 2).geometry;
        let budget = geometry.bank_bytes() as u64;
        let mut residency =
            Residency::new(&geometry, budget, ResidencySettings::default()).unwrap();
        let load = |expert, rows| ExpertLoad {
            expert,
            rows,
            resident: 1..1,
        };
        let mut sizes = Vec::new();
        for round in 0..10 {
            residency.observe(&[load(3, 1), load(7, 1), load(9 + round % 3, 1)], 1);
            sizes.push(residency.wanted(4).len());
        }
        assert_eq!(sizes[..3], [2, 4, 4]);
        let wanted = residency.wanted(4);
        assert!(
            wanted[..2].contains(&3) && wanted[..2].contains(&7),
            "{wanted:?}"
        );
        assert_eq!(residency.wanted(1).len(), 1);
        assert!(residency.wanted(0).is_empty());
    }
}
