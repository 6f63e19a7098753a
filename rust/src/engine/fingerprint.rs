//! What tells one model from another without reading all of it.

use xxhash_rust::xxh3::Xxh3;

use crate::format::catalog::Catalog;
use crate::model::binding::BoundModel;

/// Identifies the model: its config, name, type and shape of every trunk tensor,
/// and the content of all small vectors. 16 hexadecimal digits.
pub fn fingerprint(catalog: &Catalog, model: &BoundModel) -> String {
    let mut hash = Xxh3::new();
    hash.update(format!("{:?}", catalog.config).as_bytes());
    for tensor in catalog.trunk() {
        let shape = &tensor.shape;
        hash.update(format!("{} {:?} {shape:?}", tensor.name, tensor.dtype).as_bytes());
    }
    hash.update(&model.vector_hash.to_le_bytes());
    format!("{:016x}", hash.digest())
}
