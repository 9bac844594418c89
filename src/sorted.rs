//! Sorting and searching with one copy of the machine code for all types: the module is loaded into every worker's VM.

use std::cmp::Ordering;

/// The positions `0..len` in the order of what stands there; equal things keep their order.
#[must_use]
pub fn sorted_positions(len: usize, compare: &mut dyn FnMut(usize, usize) -> Ordering) -> Vec<usize> {
    let mut positions: Vec<usize> = (0..len).collect();
    positions.sort_by(|a, b| compare(*a, *b));
    positions
}

/// The positions of those that equal one before them, in order, each with the first that it equals.
#[must_use]
pub fn repeats(len: usize, compare: &mut dyn FnMut(usize, usize) -> Ordering) -> Vec<(usize, usize)> {
    let sorted = sorted_positions(len, compare);
    let mut first_of = Vec::new();
    let mut first: Option<usize> = None;
    for position in sorted {
        match first {
            Some(first) if compare(first, position).is_eq() => first_of.push((position, first)),
            Some(_) | None => first = Some(position),
        }
    }
    let order = sorted_positions(first_of.len(), &mut |a, b| first_of.get(a).cmp(&first_of.get(b)));
    order.into_iter().filter_map(|at| first_of.get(at).copied()).collect()
}

/// Header names, compared without case (RFC 9110 section 5.1).
#[derive(Debug, Default)]
pub struct NameSet<'a>(Vec<&'a [u8]>);

impl<'a> NameSet<'a> {
    /// These names.
    #[must_use]
    pub fn new(names: &[&'a [u8]]) -> Self {
        let at = |position: usize| names.get(position).copied().unwrap_or_default();
        let sorted = sorted_positions(names.len(), &mut |a, b| compare_names(at(a), at(b)));
        Self(sorted.into_iter().map(at).collect())
    }

    /// Whether `name` is one of them.
    #[must_use]
    pub fn has(&self, name: &[u8]) -> bool {
        self.0.binary_search_by(|probe| compare_names(probe, name)).is_ok()
    }
}

fn compare_names(a: &[u8], b: &[u8]) -> Ordering {
    a.iter().map(u8::to_ascii_lowercase).cmp(b.iter().map(u8::to_ascii_lowercase))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    proptest! {
        #[test]
        fn repeats_are_those_that_a_map_knows_already(values in prop::collection::vec(0_u8..6, 0..40)) {
            let mut seen = BTreeMap::new();
            let mut expected = Vec::new();
            for (at, value) in values.iter().enumerate() {
                match seen.get(value) {
                    Some(first) => expected.push((at, *first)),
                    None => _ = seen.insert(*value, at),
                }
            }
            prop_assert_eq!(repeats(values.len(), &mut |a, b| values[a].cmp(&values[b])), expected);
        }

        #[test]
        fn a_set_has_its_names_in_any_case_and_no_other(
            names in prop::collection::vec("[a-cA-C]{0,3}", 0..12), asked in "[a-cA-C]{0,3}",
        ) {
            let bytes: Vec<&[u8]> = names.iter().map(|name| name.as_bytes()).collect();
            let expected = names.iter().any(|name| name.eq_ignore_ascii_case(&asked));
            prop_assert_eq!(NameSet::new(&bytes).has(asked.as_bytes()), expected);
        }
    }
}
