//! One walk over all layers for a chunk of tokens.

use crate::engine::control::Control;
use crate::engine::{Engine, Streams};
use crate::error::{Error, Result};
use crate::model::attention_residuals::ResidualStream;
use crate::model::pass::Pass;
use crate::model::router::Route;
use crate::model::state::ModelState;
use crate::model::{decoder_layer, vocabulary};

/// Which logits a sweep computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Logits {
    /// None: the output matrix is not read.
    None,
    /// After the last token.
    Last,
    /// After every token.
    Every,
}

/// What a sweep hands back besides the new state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    /// Which logits.
    pub logits: Logits,
    /// The running sum after every layer.
    pub hidden: bool,
    /// The route of every token in every layer with experts.
    pub routes: bool,
}

/// Routes by layer with experts, then by token.
pub type RecordedRoutes = Vec<Vec<Route>>;

/// What a sweep hands back.
#[derive(Debug, Default)]
pub struct SweepOutput {
    /// `[1 or tokens, vocab]`, or empty.
    pub logits: Vec<f32>,
    /// By layer `[tokens, hidden]`, or empty.
    pub hidden: Vec<Vec<f32>>,
    /// Or empty.
    pub routes: RecordedRoutes,
}

impl Engine {
    /// Takes `ids` through the model on the compute threads. On an error
    /// `state` is half-way and must not be used again.
    pub(super) fn sweep(
        &self,
        state: &mut ModelState,
        ids: &[u32],
        wanted: Wanted,
        control: &Control,
    ) -> Result<SweepOutput> {
        // Locked here and not on a compute thread: one that waits for its part
        // of a product may be handed another session's sweep meanwhile.
        let mut streams = self.streams();
        let Streams { trunk, experts, changed } = &mut *streams;
        let output = self.threads.install(|| {
            trunk.begin_sweep(wanted.logits != Logits::None);
            let mut pass = Pass { backend: self.backend, trunk, experts, tokens: ids.len() };
            self.walk(state, ids, wanted, control, &mut pass)
        });
        // For good: what was read of a changed file stays in memory, even if the
        // file is put back.
        *changed = changed.or_else(|| self.files.iter().position(|file| !file.is_unchanged()));
        match (output, *changed) {
            (output, None) => output,
            // A file that was cut off: this says where.
            (Err(error @ Error::Io { .. }), _) => Err(error),
            (_, Some(file)) => Err(Error::Checkpoint {
                path: self.files[file].path().to_owned(),
                tensor: None,
                expected: "the file as it was opened".into(),
                found: "that it changed while it was in use".into(),
                hint: "open the model again, and let nothing write to its files meanwhile".into(),
            }),
        }
    }

    fn walk(
        &self,
        state: &mut ModelState,
        ids: &[u32],
        wanted: Wanted,
        control: &Control,
        pass: &mut Pass<'_>,
    ) -> Result<SweepOutput> {
        let config = &self.catalog.config;
        let embedding = self.catalog.tensor(crate::format::tensor_names::EMBEDDING)?;
        let file = &self.files[usize::from(embedding.extent.file.0)];
        let embedded = vocabulary::gather(embedding, file, ids)?;
        let mut stream = ResidualStream::new(embedded, config.hidden_size, config.residual_block);
        let mut output = SweepOutput::default();
        for (layer, weights) in self.model.layers.iter().enumerate() {
            let state = &mut state.layers[layer];
            let routes = decoder_layer::forward(config, layer, weights, state, &mut stream, pass)?;
            if wanted.hidden {
                output.hidden.push(stream.current().to_vec());
            }
            output.routes.extend(routes.filter(|_| wanted.routes));
            control.layer_done(layer)?;
        }
        if wanted.logits != Logits::None {
            let every = wanted.logits == Logits::Every;
            output.logits = vocabulary::logits(config, &self.model.roots, &stream, every, pass)?;
        }
        Ok(output)
    }
}
