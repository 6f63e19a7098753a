//! Typed access to the keys of a config section that collects what is wrong
//! instead of stopping at the first problem.

use serde_json::{Map, Value};

/// Largest value of any size. Far above every published model, and small
/// enough that products of three sizes and an element size fit 64 bits.
pub(super) const SIZE_MAX: u64 = 1 << 20;

/// One object of the config. All getters return `None` after having written
/// down a problem.
pub(super) struct Fields<'o, 'p> {
    /// The object's keys.
    pub object: &'o Map<String, Value>,
    /// Path of the object with a dot at the end; empty for the file itself.
    pub path: &'p str,
    /// What is wrong so far, in all sections.
    pub problems: &'p mut Vec<String>,
}

impl<'o> Fields<'o, '_> {
    /// Writes a problem with a key down.
    pub fn problem(&mut self, key: &str, problem: impl std::fmt::Display) {
        self.problems.push(format!("`{}{key}` {problem}", self.path));
    }

    fn wrong(&mut self, key: &str, expected: &str, found: &Value) {
        let mut found = found.to_string();
        if found.chars().count() > 60 {
            found = found.chars().take(60).chain("...".chars()).collect();
        }
        self.problem(key, format_args!("must be {expected}, found {found}"));
    }

    /// A key that must be there; it may be null.
    pub fn value(&mut self, key: &str) -> Option<&'o Value> {
        let value = self.object.get(key);
        if value.is_none() {
            self.problem(key, "is missing");
        }
        value
    }

    /// A nested object.
    pub fn section(&mut self, key: &str) -> Option<&'o Map<String, Value>> {
        let value = self.value(key)?;
        if value.as_object().is_none() {
            self.wrong(key, "an object", value);
        }
        value.as_object()
    }

    /// A whole number in a range.
    pub fn count(&mut self, key: &str, smallest: u64, largest: u64) -> Option<usize> {
        let value = self.value(key)?;
        self.as_count(key, value, smallest, largest)
    }

    /// A size: at least 1.
    pub fn size(&mut self, key: &str) -> Option<usize> {
        self.count(key, 1, SIZE_MAX)
    }

    /// A size or null. The outer `None` is a problem.
    pub fn size_or_null(&mut self, key: &str) -> Option<Option<usize>> {
        match self.value(key)? {
            Value::Null => Some(None),
            value => self.as_count(key, value, 1, SIZE_MAX).map(Some),
        }
    }

    fn as_count(&mut self, key: &str, value: &Value, smallest: u64, largest: u64) -> Option<usize> {
        match value.as_u64() {
            Some(count) if (smallest..=largest).contains(&count) => usize::try_from(count).ok(),
            _ => {
                let expected = format!("a whole number from {smallest} to {largest}");
                self.wrong(key, &expected, value);
                None
            }
        }
    }

    /// `true` or `false`.
    pub fn flag(&mut self, key: &str) -> Option<bool> {
        let value = self.value(key)?;
        if !value.is_boolean() {
            self.wrong(key, "true or false", value);
        }
        value.as_bool()
    }

    /// A flag whose absence the published configuration defines as false.
    pub fn flag_or_false(&mut self, key: &str) -> Option<bool> {
        if self.object.contains_key(key) { self.flag(key) } else { Some(false) }
    }

    /// A number that is above zero, also as a float32.
    pub fn positive(&mut self, key: &str) -> Option<f32> {
        let value = self.value(key)?;
        self.as_number(key, value, "a number above 0", |number| number > 0.0)
    }

    /// A number or null. The outer `None` is a problem; `accepts` sees the
    /// value as a float32.
    pub fn number_or_null(
        &mut self,
        key: &str,
        expected: &str,
        accepts: impl FnOnce(f32) -> bool,
    ) -> Option<Option<f32>> {
        match self.value(key)? {
            Value::Null => Some(None),
            value => self.as_number(key, value, expected, accepts).map(Some),
        }
    }

    fn as_number(
        &mut self,
        key: &str,
        value: &Value,
        expected: &str,
        accepts: impl FnOnce(f32) -> bool,
    ) -> Option<f32> {
        let number = value.as_f64().map(|number| number as f32);
        let number = number.filter(|number| number.is_finite() && accepts(*number));
        if number.is_none() {
            self.wrong(key, expected, value);
        }
        number
    }

    /// One of several words.
    pub fn choice<T: Copy>(&mut self, key: &str, choices: &[(&str, T)]) -> Option<T> {
        let value = self.value(key)?;
        let chosen = choices.iter().find(|(word, _)| value.as_str() == Some(word));
        if chosen.is_none() {
            let words: Vec<String> =
                choices.iter().map(|(word, _)| format!("\"{word}\"")).collect();
            self.wrong(key, &words.join(" or "), value);
        }
        chosen.map(|(_, choice)| *choice)
    }

    /// A list of whole numbers from 1 to `largest`.
    pub fn numbers_from_one(&mut self, key: &str, largest: usize) -> Option<Vec<usize>> {
        let value = self.value(key)?;
        let Value::Array(items) = value else {
            self.wrong(key, "a list of layers", value);
            return None;
        };
        let expected = format!("a list of layers from 1 to {largest}, as layers count from one");
        items.iter().map(|item| self.as_number_from_one(key, item, &expected, largest)).collect()
    }

    fn as_number_from_one(
        &mut self,
        key: &str,
        item: &Value,
        expected: &str,
        largest: usize,
    ) -> Option<usize> {
        let number = item.as_u64().and_then(|number| usize::try_from(number).ok());
        let number = number.filter(|number| (1..=largest).contains(number));
        if number.is_none() {
            self.wrong(key, expected, item);
        }
        number
    }
}
