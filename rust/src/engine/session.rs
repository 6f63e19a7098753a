//! One text: its state and its position.

use std::sync::Arc;

use crate::engine::Engine;
use crate::engine::control::Control;
use crate::engine::sweep::{Logits, SweepOutput, Wanted};
use crate::error::{Error, Result};
use crate::model::state::ModelState;

/// All that grows with a text. Sessions on one engine do not see each other.
pub struct Session {
    engine: Arc<Engine>,
    state: ModelState,
    position: usize,
    aborted: bool,
}

impl Session {
    /// An empty session.
    pub fn new(engine: Arc<Engine>) -> Self {
        let state = ModelState::new(&engine.catalog().config);
        Session { engine, state, position: 0, aborted: false }
    }

    /// Tokens that the state stands for.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Back to the empty text; also after an abort.
    pub fn reset(&mut self) {
        *self = Session::new(Arc::clone(&self.engine));
    }

    /// Makes the session refuse to go on until it is reset: its caller did not
    /// get the result of its last call.
    pub fn abort(&mut self) {
        self.aborted = true;
    }

    /// Takes `ids` through the model, in chunks of the plan's size. Feeding
    /// them one by one, in pieces or at once gives the same bits.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] for no ids or an id outside the vocabulary (the
    /// session stays usable); [`Error::SessionAborted`] after an earlier
    /// failure; anything that a sweep can fail with, after which the session is
    /// aborted.
    pub fn forward(
        &mut self,
        ids: &[u32],
        wanted: Wanted,
        control: &Control,
    ) -> Result<SweepOutput> {
        if self.aborted {
            return Err(Error::SessionAborted);
        }
        self.check(ids)?;
        self.aborted = true;
        let chunk = self.engine.plan().chunk.max(1);
        let mut output = SweepOutput::default();
        for (index, part) in ids.chunks(chunk).enumerate() {
            let last = (index + 1) * chunk >= ids.len();
            let logits = match wanted.logits {
                Logits::Last if !last => Logits::None,
                logits => logits,
            };
            let wanted = Wanted { logits, ..wanted };
            let swept = self.engine.sweep(&mut self.state, part, wanted, control)?;
            output.append(swept);
            self.position += part.len();
        }
        self.aborted = false;
        Ok(output)
    }

    fn check(&self, ids: &[u32]) -> Result<()> {
        let vocabulary = self.engine.catalog().config.vocab_size;
        if ids.is_empty() {
            return Err(Error::invalid(
                "there are no token ids to process",
                "give at least one id; this model has no implicit start token",
            ));
        }
        match ids.iter().find(|id| **id as usize >= vocabulary) {
            None => Ok(()),
            Some(id) => Err(Error::invalid(
                format!("token id {id} is outside the vocabulary of {vocabulary}"),
                format!("ids go from 0 to {}", vocabulary - 1),
            )),
        }
    }
}

impl SweepOutput {
    /// Puts the output of the next chunk behind this one.
    fn append(&mut self, next: SweepOutput) {
        if self.logits.is_empty() {
            self.logits = next.logits;
        } else {
            self.logits.extend(next.logits);
        }
        if self.hidden.is_empty() {
            self.hidden = next.hidden;
        } else {
            let layers = self.hidden.iter_mut().zip(next.hidden);
            layers.for_each(|(hidden, next)| hidden.extend(next));
        }
        if self.routes.is_empty() {
            self.routes = next.routes;
        } else {
            let layers = self.routes.iter_mut().zip(next.routes);
            layers.for_each(|(routes, next)| routes.extend(next));
        }
    }
}
