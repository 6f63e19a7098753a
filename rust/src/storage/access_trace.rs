//! The experts that were asked for, in order, token by token.
//!
//! What a cache of another size or another policy would have made of a run
//! follows from this alone; see [`crate::storage::trace_replay`].

use crate::error::{Error, Result};

/// Requests for experts: for each token, the layers with experts in the order
/// in which they are visited, and the experts that each of them used.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AccessTrace {
    visits: Vec<VisitEnd>,
    experts: Vec<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct VisitEnd {
    token: usize,
    layer: u32,
    /// Where the visit's experts end in the list of all.
    end: usize,
}

/// The experts that a token used in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Visit<'a> {
    /// The token, counted from 0.
    pub token: usize,
    /// The layer.
    pub layer: u32,
    /// At least one, each once.
    pub experts: &'a [u32],
}

impl AccessTrace {
    /// A trace from `(token, layer, expert)` in order.
    ///
    /// # Errors
    /// As [`AccessTrace::push`].
    pub fn from_requests(requests: impl IntoIterator<Item = [u32; 3]>) -> Result<Self> {
        let mut trace = AccessTrace::default();
        let mut open: Option<(u32, u32)> = None;
        let mut experts = Vec::new();
        for [token, layer, expert] in requests {
            if open != Some((token, layer)) {
                if let Some((token, layer)) = open.replace((token, layer)) {
                    trace.push(token as usize, layer, &experts)?;
                }
                experts.clear();
            }
            experts.push(expert);
        }
        if let Some((token, layer)) = open {
            trace.push(token as usize, layer, &experts)?;
        }
        Ok(trace)
    }

    /// Records that `token` used `experts` of `layer`.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] when the token is neither the last recorded one
    /// nor the next, when the layers of a token do not rise, or when there is no
    /// expert or one of them twice.
    pub fn push(&mut self, token: usize, layer: u32, experts: &[u32]) -> Result<()> {
        let problem = match self.visits.last() {
            None if token != 0 => Some(format!("expected token 0 first, found {token}")),
            Some(last) if token != last.token && token != last.token + 1 => {
                Some(format!("expected token {0} or the next, found {token}", last.token))
            }
            Some(last) if token == last.token && layer <= last.layer => {
                Some(format!("expected a layer above {} next, found {layer}", last.layer))
            }
            _ => repeated(experts),
        };
        if let Some(problem) = problem {
            return Err(Error::invalid(
                format!("expert requests of token {token}, layer {layer}: {problem}"),
                "a trace lists the tokens from 0, for each the layers in rising order, and for \
                 each layer every expert once",
            ));
        }
        self.experts.extend_from_slice(experts);
        self.visits.push(VisitEnd { token, layer, end: self.experts.len() });
        Ok(())
    }

    /// How many tokens were recorded.
    pub fn tokens(&self) -> usize {
        self.visits.last().map_or(0, |visit| visit.token + 1)
    }

    /// How many experts were asked for, over all tokens from `first_token` on.
    pub fn requests(&self, first_token: usize) -> usize {
        let skipped = self.visits.partition_point(|visit| visit.token < first_token);
        let before = skipped.checked_sub(1).map_or(0, |last| self.visits[last].end);
        self.experts.len() - before
    }

    /// Everything recorded, in order.
    pub fn visits(&self) -> impl Iterator<Item = Visit<'_>> {
        let starts = std::iter::once(0).chain(self.visits.iter().map(|visit| visit.end));
        starts.zip(&self.visits).map(|(start, visit)| Visit {
            token: visit.token,
            layer: visit.layer,
            experts: &self.experts[start..visit.end],
        })
    }
}

/// What is wrong with a list of experts, if anything.
fn repeated(experts: &[u32]) -> Option<String> {
    let mut sorted = experts.to_vec();
    sorted.sort_unstable();
    match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Some(format!("expected every expert once, found {} twice", pair[0])),
        None => experts.is_empty().then(|| "expected at least one expert, found none".to_owned()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn visits_come_back_in_order() {
        let requests = [[0, 1, 7], [0, 1, 3], [0, 4, 7], [1, 1, 3], [1, 4, 0], [1, 4, 9]];
        let trace = AccessTrace::from_requests(requests).unwrap();
        assert_eq!((trace.tokens(), trace.requests(0)), (2, 6));
        assert_eq!((trace.requests(1), trace.requests(2)), (3, 0));
        let visits: Vec<Visit<'_>> = trace.visits().collect();
        assert_eq!(visits.len(), 4);
        assert_eq!(visits[0], Visit { token: 0, layer: 1, experts: &[7, 3] });
        assert_eq!(visits[3], Visit { token: 1, layer: 4, experts: &[0, 9] });
        let again = visits.iter().flat_map(|visit| {
            visit.experts.iter().map(|expert| [visit.token as u32, visit.layer, *expert])
        });
        assert_eq!(AccessTrace::from_requests(again).unwrap(), trace);
    }

    #[test]
    fn nothing_recorded_is_a_trace() {
        let trace = AccessTrace::from_requests([]).unwrap();
        assert_eq!((trace.tokens(), trace.requests(0), trace.visits().count()), (0, 0, 0));
    }

    #[test]
    fn what_is_out_of_order_is_refused() {
        for (requests, problem) in [
            (vec![[1, 1, 0]], "expected token 0 first, found 1"),
            (vec![[0, 1, 0], [2, 1, 0]], "expected token 0 or the next, found 2"),
            (vec![[0, 1, 0], [1, 1, 0], [0, 2, 0]], "expected token 1 or the next, found 0"),
            (vec![[0, 3, 0], [0, 2, 0]], "expected a layer above 3 next, found 2"),
            (vec![[0, 3, 5], [0, 3, 1], [0, 3, 5]], "expected every expert once, found 5 twice"),
        ] {
            let error = AccessTrace::from_requests(requests).unwrap_err();
            assert!(error.to_string().ends_with(problem), "{error}");
            assert!(error.hint().unwrap().contains("rising order"));
        }
        assert!(AccessTrace::default().push(0, 0, &[]).is_err());
    }
}
