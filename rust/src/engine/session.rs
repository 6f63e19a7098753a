//! One text: its state and its position.

use std::borrow::Cow;
use std::path::Path;
use std::sync::Arc;

use crate::engine::Engine;
use crate::engine::control::Control;
use crate::engine::session_file::{self, SavedText};
use crate::engine::sweep::{Logits, SweepOutput, Wanted};
use crate::error::{Error, Result};
use crate::model::state::ModelState;

/// All that grows with a text. Sessions on one engine do not see each other.
pub struct Session {
    engine: Arc<Engine>,
    state: ModelState,
    /// The ids that the state stands for.
    ids: Vec<u32>,
    /// After the last of them; empty before the first.
    logits: Vec<f32>,
    aborted: bool,
}

impl Session {
    /// An empty session.
    pub fn new(engine: Arc<Engine>) -> Self {
        let state = ModelState::new(&engine.catalog().config);
        Session { engine, state, ids: Vec::new(), logits: Vec::new(), aborted: false }
    }

    /// The ids that the state stands for.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// The logits after the last of them, `[vocab]`; none before the first.
    ///
    /// # Errors
    /// [`Error::SessionAborted`].
    pub fn logits(&self) -> Result<Option<&[f32]>> {
        if self.aborted {
            return Err(Error::SessionAborted);
        }
        Ok(Some(self.logits.as_slice()).filter(|logits| !logits.is_empty()))
    }

    /// Writes the session to `path`: its state, its ids, behind them `pending`
    /// ids that it has not taken yet, and a `note` for the caller.
    ///
    /// # Errors
    /// [`Error::SessionAborted`], and those of [`session_file::save`].
    pub fn save(&self, path: &Path, pending: &[u32], note: &str) -> Result<()> {
        if self.aborted {
            return Err(Error::SessionAborted);
        }
        self.check(pending)?;
        let text = SavedText {
            state: Cow::Borrowed(&self.state),
            positions: self.ids.len(),
            ids: [&self.ids, pending].concat(),
            logits: Cow::Borrowed(&self.logits),
            note: note.to_owned(),
        };
        let engine = &self.engine;
        session_file::save(path, &engine.catalog().config, engine.fingerprint(), &text)
    }

    /// The session saved at `path`, the ids that it had not taken yet, and its note.
    ///
    /// # Errors
    /// Those of [`session_file::load`].
    pub fn load(engine: Arc<Engine>, path: &Path) -> Result<(Self, Vec<u32>, String)> {
        let text = session_file::load(path, &engine.catalog().config, engine.fingerprint())?;
        let SavedText { state, positions, mut ids, logits, note } = text;
        let pending = ids.split_off(positions);
        let (state, logits) = (state.into_owned(), logits.into_owned());
        Ok((Session { engine, state, ids, logits, aborted: false }, pending, note))
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

    /// Whether it refuses to go on until it is reset.
    pub fn is_aborted(&self) -> bool {
        self.aborted
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
        if ids.is_empty() {
            return Err(Error::invalid(
                "there are no token ids to process",
                "give at least one id; this model has no implicit start token",
            ));
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
            self.ids.extend_from_slice(part);
        }
        let vocabulary = self.engine.catalog().config.vocab_size;
        if let Some(last) = output.logits.rchunks_exact(vocabulary).next() {
            self.logits.clear();
            self.logits.extend_from_slice(last);
        }
        self.aborted = false;
        Ok(output)
    }

    fn check(&self, ids: &[u32]) -> Result<()> {
        let vocabulary = self.engine.catalog().config.vocab_size;
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
