//! Random bytes that can be asked for at any offset.
//!
//! Word `i` of a stream is SplitMix64 at its key plus `i` steps: nothing is
//! carried from word to word, so the bytes do not depend on the pieces in
//! which, nor on the threads by which, they are made.

use xxhash_rust::xxh3::xxh3_64_with_seed;

const WORD: usize = size_of::<u64>();
/// Step of SplitMix64.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// The random bytes of one tensor.
#[derive(Debug, Clone, Copy)]
pub(super) struct RandomStream {
    key: u64,
}

impl RandomStream {
    /// The stream of the tensor `name` under a seed.
    pub fn new(seed: u64, name: &str) -> Self {
        RandomStream { key: xxh3_64_with_seed(name.as_bytes(), seed) }
    }

    /// Fills `buffer` with the bytes from `offset` on.
    pub fn fill(self, offset: u64, buffer: &mut [u8]) {
        let mut index = offset / WORD as u64;
        let skipped = (offset % WORD as u64) as usize;
        let head = if skipped == 0 { 0 } else { (WORD - skipped).min(buffer.len()) };
        let (head, whole) = buffer.split_at_mut(head);
        if !head.is_empty() {
            head.copy_from_slice(&self.word(index)[skipped..][..head.len()]);
            index += 1;
        }
        let (words, tail) = whole.as_chunks_mut::<WORD>();
        let after = index + words.len() as u64;
        for (word, number) in words.iter_mut().zip(index..after) {
            *word = self.word(number);
        }
        tail.copy_from_slice(&self.word(after)[..tail.len()]);
    }

    fn word(self, index: u64) -> [u8; WORD] {
        let mut state = self.key.wrapping_add(index.wrapping_add(1).wrapping_mul(STEP));
        state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (state ^ (state >> 31)).to_le_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_those_of_the_published_generator() {
        let stream = RandomStream { key: 1_234_567 };
        let words = [0, 1, 2].map(|index| u64::from_le_bytes(stream.word(index)));
        assert_eq!(words, [6457827717110365317, 3203168211198807973, 9817491932198370423]);
    }

    #[test]
    fn any_piece_is_a_piece_of_the_whole() {
        let stream = RandomStream::new(7, "model.norm.weight");
        let mut whole = [0; 40];
        stream.fill(0, &mut whole);
        for start in 0..whole.len() {
            for end in start..=whole.len() {
                let mut piece = vec![0; end - start];
                stream.fill(start as u64, &mut piece);
                assert_eq!(piece, whole[start..end], "{start}..{end}");
            }
        }
    }

    #[test]
    fn seeds_and_names_give_streams_of_their_own() {
        let first = |seed, name| RandomStream::new(seed, name).word(0);
        assert_ne!(first(0, "a"), first(1, "a"));
        assert_ne!(first(0, "a"), first(0, "b"));
    }
}
