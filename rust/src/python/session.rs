//! `Session`: ids in, logits out.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use numpy::ndarray::{Array2, Array3};
use numpy::{IntoPyArray, PyArray1, PyArray2, PyArrayMethods};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::engine::{Control, Engine, Logits, RecordedRoutes, SweepOutput, Wanted};
use crate::error::Error;
use crate::python::gil;

/// One text: everything that grows with it.
#[pyclass(frozen, module = "k3rs._k3rs")]
pub(super) struct Session {
    engine: Arc<Engine>,
    session: Mutex<crate::engine::Session>,
}

/// A session, its ids that the state does not stand for yet, and its note.
pub(super) type Loaded = (Session, Vec<u32>, String);

impl Session {
    pub(super) fn new(engine: Arc<Engine>) -> Self {
        let session = Mutex::new(crate::engine::Session::new(Arc::clone(&engine)));
        Session { engine, session }
    }

    pub(super) fn load(engine: Arc<Engine>, path: &Path) -> crate::Result<Loaded> {
        let loaded = crate::engine::Session::load(Arc::clone(&engine), path)?;
        let (session, pending, note) = loaded;
        Ok((Session { engine, session: Mutex::new(session) }, pending, note))
    }
}

#[pymethods]
impl Session {
    /// Tokens that the state stands for.
    #[getter]
    fn position(&self) -> usize {
        self.lock().ids().len()
    }

    /// The ids that the state stands for.
    #[getter]
    fn ids(&self) -> Vec<u32> {
        self.lock().ids().to_vec()
    }

    /// Whether it stopped in the middle of a sweep and cannot go on.
    #[getter]
    fn is_aborted(&self) -> bool {
        self.lock().is_aborted()
    }

    /// The logits after the last id, or `None` before the first.
    fn last_logits<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyArray1<f32>>>> {
        Ok(self.lock().logits()?.map(|logits| PyArray1::from_slice(py, logits)))
    }

    /// Writes the session and `pending` ids behind its own to `path`.
    fn save(&self, py: Python<'_>, path: PathBuf, pending: Vec<u32>, note: &str) -> PyResult<()> {
        Ok(py.detach(|| self.lock().save(&path, &pending, note))?)
    }

    /// Takes ids through the model; see `k3rs.Session.forward`.
    #[pyo3(signature = (ids, *, all_positions=false, capture_hidden=false,
                        capture_router=false, progress=None))]
    fn forward<'py>(
        &self,
        py: Python<'py>,
        ids: Vec<i64>,
        all_positions: bool,
        capture_hidden: bool,
        capture_router: bool,
        progress: Option<Bound<'py, PyAny>>,
    ) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyDict>)> {
        let ids = ids.into_iter().map(token_id).collect::<crate::Result<Vec<u32>>>()?;
        let logits = if all_positions { Logits::Every } else { Logits::Last };
        let wanted = Wanted { logits, hidden: capture_hidden, routes: capture_router };
        let sweep = |control: &Control| self.lock().forward(&ids, wanted, control);
        let layers = self.layer_steps(ids.len());
        let output = gil::run(py, progress.as_ref(), layers, sweep, || self.lock().abort())?;
        let SweepOutput { logits, hidden, routes } = output;
        let seen = PyDict::new(py);
        if capture_hidden {
            seen.set_item("hidden", self.hidden_array(hidden, ids.len())?.into_pyarray(py))?;
        }
        if capture_router {
            seen.set_item("router", router_list(py, &routes)?)?;
        }
        let logits = PyArray1::from_vec(py, logits);
        if all_positions {
            let vocabulary = self.engine.catalog().config.vocab_size;
            return Ok((logits.reshape([ids.len(), vocabulary])?.into_any(), seen));
        }
        Ok((logits.into_any(), seen))
    }

    /// Back to the empty text.
    fn reset(&self) {
        self.lock().reset();
    }
}

impl Session {
    fn lock(&self) -> MutexGuard<'_, crate::engine::Session> {
        // A panic in a sweep leaves the session marked as aborted.
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Layers that taking `ids` ids takes, over all chunks.
    fn layer_steps(&self, ids: usize) -> usize {
        let layers = self.engine.catalog().config.layers.len();
        layers * ids.div_ceil(self.engine.plan().chunk.max(1))
    }

    fn hidden_array(&self, hidden: Vec<Vec<f32>>, tokens: usize) -> PyResult<Array3<f32>> {
        let shape = (hidden.len(), tokens, self.engine.catalog().config.hidden_size);
        Ok(Array3::from_shape_vec(shape, hidden.concat()).map_err(shape_error)?)
    }
}

fn router_list<'py>(py: Python<'py>, routes: &RecordedRoutes) -> PyResult<Bound<'py, PyList>> {
    let layers = PyList::empty(py);
    for tokens in routes {
        let width = tokens.first().map_or(0, |route| route.experts.len());
        let experts: Vec<i32> =
            tokens.iter().flat_map(|route| route.experts.iter().map(|id| *id as i32)).collect();
        let weights: Vec<f32> = tokens.iter().flat_map(|route| route.weights.clone()).collect();
        let shape = (tokens.len(), width);
        let experts = Array2::from_shape_vec(shape, experts).map_err(shape_error)?;
        let weights = Array2::from_shape_vec(shape, weights).map_err(shape_error)?;
        let pair: (Bound<'py, PyArray2<i32>>, Bound<'py, PyArray2<f32>>) =
            (experts.into_pyarray(py), weights.into_pyarray(py));
        layers.append(pair)?;
    }
    Ok(layers)
}

fn shape_error(error: numpy::ndarray::ShapeError) -> Error {
    Error::invalid(format!("recorded values have no shape: {error}"), "report this as a bug")
}

fn token_id(id: i64) -> crate::Result<u32> {
    u32::try_from(id).map_err(|_| {
        Error::invalid(format!("token id {id} is outside the vocabulary"), "ids count from 0")
    })
}
