//! A chunk's routing turned around: each distinct expert once, with the tokens
//! that want it, so that it is read and decoded once a chunk.

use crate::model::router::Route;

/// One expert of a chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Visit {
    /// The expert.
    pub expert: usize,
    /// For each token that wants it: the token and its rank in the token's route.
    pub users: Vec<(usize, usize)>,
}

/// The visits of a chunk, by expert id.
pub fn schedule(routes: &[Route]) -> Vec<Visit> {
    let mut wishes: Vec<(usize, usize, usize)> = routes
        .iter()
        .enumerate()
        .flat_map(|(token, route)| {
            route.experts.iter().enumerate().map(move |(rank, expert)| (*expert, token, rank))
        })
        .collect();
    wishes.sort_unstable();
    wishes
        .chunk_by(|a, b| a.0 == b.0)
        .map(|same| Visit {
            expert: same[0].0,
            users: same.iter().map(|(_, token, rank)| (*token, *rank)).collect(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_expert_once_with_all_its_tokens() {
        let route = |experts: &[usize]| Route { experts: experts.to_vec(), weights: vec![] };
        let visits = schedule(&[route(&[2, 7]), route(&[0, 7])]);
        let expected = [(0, vec![(1, 0)]), (2, vec![(0, 0)]), (7, vec![(0, 1), (1, 1)])];
        assert_eq!(visits, expected.map(|(expert, users)| Visit { expert, users }));
    }
}
