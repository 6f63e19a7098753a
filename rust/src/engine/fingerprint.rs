//! What tells one model from another without reading all of it.

use rayon::prelude::*;
use xxhash_rust::xxh3::Xxh3;

use crate::error::Result;
use crate::format::catalog::Catalog;
use crate::io::extent::Extent;
use crate::io::file::WeightFile;
use crate::model::binding::BoundModel;

/// Bytes at either end of a matrix that count: training changes them all.
const SAMPLE_BYTES: u64 = 256;

/// Identifies the model: its config, name, type and shape of every trunk tensor,
/// the content of all small vectors, and both ends of every matrix and of the
/// first expert of each layer. 16 hexadecimal digits.
///
/// A change in the middle of a matrix alone is not seen.
///
/// # Errors
/// [`crate::Error::Io`].
pub fn fingerprint(catalog: &Catalog, files: &[WeightFile], model: &BoundModel) -> Result<String> {
    let mut hash = Xxh3::new();
    hash.update(format!("{:?}", catalog.config).as_bytes());
    for tensor in catalog.trunk() {
        let shape = &tensor.shape;
        hash.update(format!("{} {:?} {shape:?}", tensor.name, tensor.dtype).as_bytes());
    }
    hash.update(&model.vector_hash.to_le_bytes());
    let trunk = catalog.trunk().iter().map(|tensor| tensor.extent);
    let experts = catalog.experts.layers().flat_map(|layer| catalog.experts.parts(layer, 0));
    let matrices: Vec<Extent> = trunk.chain(experts).collect();
    let samples: Vec<Vec<u8>> =
        matrices.par_iter().map(|extent| ends(files, *extent)).collect::<Result<_>>()?;
    samples.iter().for_each(|sample| hash.update(sample));
    Ok(format!("{:016x}", hash.digest()))
}

/// The first and the last bytes of a tensor, or all of a small one.
fn ends(files: &[WeightFile], extent: Extent) -> Result<Vec<u8>> {
    let count = extent.length.min(SAMPLE_BYTES);
    let mut bytes = vec![0; 2 * count as usize];
    let (first, last) = bytes.split_at_mut(count as usize);
    let file = &files[usize::from(extent.file.0)];
    file.read_exact(extent.offset, first)?;
    file.read_exact(extent.end() - count, last)?;
    Ok(bytes)
}
