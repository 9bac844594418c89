//! Reading the members of an object: spellings, repeats, unknown names. What a value means is not known here.

use super::json::{Json, quoted};
use super::problem::Problems;
use crate::sorted::repeats;

/// A setting as far as it is known after reading.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) enum Field<T> {
    /// Not given.
    #[default]
    Absent,
    /// Given and refused; checks that need it are passed over.
    Invalid,
    /// Given and valid by itself.
    Given { value: T, path: String },
}

impl<T: Clone> Field<T> {
    /// This setting, or `fallback` where it was not given.
    #[inline(never)]
    pub(super) fn or(self, fallback: &Self) -> Self {
        match self {
            Self::Absent => fallback.clone(),
            Self::Invalid | Self::Given { .. } => self,
        }
    }
}

impl<T> Field<T> {
    pub(super) fn given(self) -> Option<T> {
        match self {
            Self::Given { value, .. } => Some(value),
            Self::Absent | Self::Invalid => None,
        }
    }

    pub(super) fn given_or(self, default: T) -> T {
        self.given().unwrap_or(default)
    }

    pub(super) fn is_absent(&self) -> bool {
        matches!(self, Self::Absent)
    }

    /// Value and path, or `built_in` without a path where nothing was given.
    pub(super) fn known_or<'a>(&'a self, built_in: &'a T) -> Option<(&'a T, Option<&'a str>)> {
        match self {
            Self::Absent => Some((built_in, None)),
            Self::Invalid => None,
            Self::Given { value, path } => Some((value, Some(path))),
        }
    }

    /// Value and path, where given.
    pub(super) fn located(&self) -> Option<(&T, &str)> {
        match self {
            Self::Given { value, path } => Some((value, path)),
            Self::Absent | Self::Invalid => None,
        }
    }
}

/// One object being read. Every name asked for is an allowed one; [`Object::finish`] refuses the others.
pub(super) struct Object<'a> {
    path: String,
    members: &'a [(String, Json)],
    allowed: Vec<&'static str>,
    /// Names that are refused with a reason of their own.
    refused: Vec<&'static str>,
}

impl<'a> Object<'a> {
    /// Begins to read `json`, which must be an object; `expected` says what it is for.
    #[inline(never)]
    pub(super) fn begin(json: &'a Json, path: &str, expected: &str, problems: &mut Problems) -> Option<Self> {
        if let Json::Object(members) = json {
            return Some(Self { path: path.to_owned(), members, allowed: Vec::new(), refused: Vec::new() });
        }
        problems.refuse(path, got(json, expected));
        None
    }

    /// Reads a value that is right or wrong as a whole.
    pub(super) fn field<T>(
        &mut self,
        name: &'static str,
        problems: &mut Problems,
        parse: impl FnOnce(&Json) -> Result<T, String>,
    ) -> Field<T> {
        let mut parse = Some(parse);
        self.read(name, problems, &mut |json, path, problems| {
            parse.take().and_then(|parse| report(parse(json), path, problems))
        })
    }

    /// Reads a value that reports what is wrong inside it.
    pub(super) fn nested<T>(
        &mut self,
        name: &'static str,
        problems: &mut Problems,
        read: impl FnOnce(&Json, &str, &mut Problems) -> Option<T>,
    ) -> Field<T> {
        let mut read = Some(read);
        self.read(name, problems, &mut |json, path, problems| {
            read.take().and_then(|read| read(json, path, problems))
        })
    }

    /// One copy for each type of value, not for each setting.
    #[inline(never)]
    fn read<T>(
        &mut self,
        name: &'static str,
        problems: &mut Problems,
        read: &mut dyn FnMut(&Json, &str, &mut Problems) -> Option<T>,
    ) -> Field<T> {
        match self.member(name, problems) {
            Field::Absent => Field::Absent,
            Field::Invalid => Field::Invalid,
            Field::Given { value: json, path } => match read(json, &path, problems) {
                Some(value) => Field::Given { value, path },
                None => Field::Invalid,
            },
        }
    }

    /// The member of that name, in either spelling. Not generic, and never inlined: every setting is read through it,
    /// and the module that Envoy loads should be small.
    #[inline(never)]
    fn member(&mut self, name: &'static str, problems: &mut Problems) -> Field<&'a Json> {
        self.allowed.push(name);
        let mut found = self.spelled(name);
        let Some((spelling, json)) = found.next() else { return Field::Absent };
        let path = member_path(&self.path, spelling);
        if let Some((other, _)) = found.next() {
            let message = if other == spelling {
                "given twice, expected once".to_owned()
            } else {
                format!("given twice, as {} and {}, expected once", quoted(spelling), quoted(other))
            };
            problems.refuse(&path, message);
            return Field::Invalid;
        }
        Field::Given { value: json, path }
    }

    /// Refuses a known name for `reason`, and says whether it was given.
    pub(super) fn refuse(&mut self, name: &'static str, reason: &str, problems: &mut Problems) -> bool {
        self.refused.push(name);
        let mut given = false;
        for (spelling, _) in self.spelled(name) {
            problems.refuse(&member_path(&self.path, spelling), reason);
            given = true;
        }
        given
    }

    /// Whether there is nothing in it but what was asked for.
    pub(super) fn is_read(&self) -> bool {
        self.others().next().is_none()
    }

    /// Refuses every member that was not asked for, for one `reason`.
    pub(super) fn finish_alone(self, reason: &str, problems: &mut Problems) {
        for spelling in self.others() {
            problems.refuse(&member_path(&self.path, spelling), reason);
        }
    }

    /// Refuses every member that was not asked for.
    #[inline(never)]
    pub(super) fn finish(self, problems: &mut Problems) {
        for spelling in self.others() {
            let message = match nearest(spelling, &self.allowed) {
                Some(name) => format!("unknown field, did you mean \"{name}\"?"),
                None => format!("unknown field, expected one of: {}", self.allowed.join(", ")),
            };
            problems.refuse(&member_path(&self.path, spelling), message);
        }
    }

    /// The members that were not asked for.
    fn others(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        let known: Vec<_> =
            self.allowed.iter().chain(&self.refused).map(|name| (*name, camel_case(name))).collect();
        self.members.iter().map(|(spelling, _)| spelling.as_str()).filter(move |spelling| {
            !known.iter().any(|(snake, camel)| snake == spelling || camel == spelling)
        })
    }

    fn spelled(&self, name: &'static str) -> impl Iterator<Item = (&'a str, &'a Json)> + use<'a> {
        let camel = camel_case(name);
        self.members
            .iter()
            .filter(move |(spelling, _)| spelling == name || *spelling == camel)
            .map(|(spelling, json)| (spelling.as_str(), json))
    }
}

/// Reads a list whose items report what is wrong inside them; an item listed twice is refused.
pub(super) fn list<T: Ord>(
    json: &Json,
    path: &str,
    expected: &str,
    problems: &mut Problems,
    mut read: impl FnMut(&Json, &str, &mut Problems) -> Option<T>,
) -> Option<Vec<T>> {
    let Json::List(items) = json else {
        problems.refuse(path, got(json, expected));
        return None;
    };
    let mut values = Vec::with_capacity(items.len());
    for (index, item) in items.iter().enumerate() {
        let path = format!("{path}[{index}]");
        values.extend(read(item, &path, problems).map(|value| (index, value)));
    }
    let at = |position: usize| values.get(position).map(|(_, value)| value);
    let repeats = repeats(values.len(), &mut |a, b| at(a).cmp(&at(b)));
    for (position, _) in &repeats {
        if let Some(index) = values.get(*position).map(|(index, _)| *index)
            && let Some(item) = items.get(index)
        {
            problems.refuse(&format!("{path}[{index}]"), format!("{} is listed twice", item.excerpt()));
        }
    }
    let whole = repeats.is_empty() && values.len() == items.len();
    whole.then(|| values.into_iter().map(|(_, value)| value).collect())
}

/// Hands a parsed value on, or its error to `problems`.
#[inline(never)]
pub(super) fn report<T>(parsed: Result<T, String>, path: &str, problems: &mut Problems) -> Option<T> {
    parsed.map_err(|message| problems.refuse(path, message)).ok()
}

/// The common form of a refusal.
#[inline(never)]
pub(super) fn got(json: &Json, expected: &str) -> String {
    format!("got {}, expected {expected}", json.excerpt())
}

fn member_path(parent: &str, name: &str) -> String {
    let plain = !name.is_empty()
        && name.len() <= 64
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-'));
    match (plain, parent.is_empty()) {
        (true, true) => name.to_owned(),
        (true, false) => format!("{parent}.{name}"),
        (false, _) => format!("{parent}[{}]", quoted(name)),
    }
}

fn camel_case(name: &str) -> String {
    let mut camel = String::with_capacity(name.len());
    let mut upper = false;
    for c in name.chars() {
        if c == '_' {
            upper = true;
        } else if upper {
            camel.push(c.to_ascii_uppercase());
            upper = false;
        } else {
            camel.push(c);
        }
    }
    camel
}

/// The allowed name that `given` most likely stands for.
pub(super) fn nearest(given: &str, allowed: &[&'static str]) -> Option<&'static str> {
    if given.len() > 64 {
        return None;
    }
    let given = bare(given);
    allowed
        .iter()
        .map(|name| (edit_distance(&given, &bare(name)), *name))
        .filter(|(distance, name)| *distance <= (name.len() / 3).min(3))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, name)| name)
}

/// A name without what the spellings of one word differ in.
fn bare(name: &str) -> String {
    name.chars().filter(|c| !matches!(c, '_' | '-' | '.' | ' ')).map(|c| c.to_ascii_lowercase()).collect()
}

/// Levenshtein's distance.
fn edit_distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.chars().count()).collect();
    for (index, x) in a.chars().enumerate() {
        let mut left = index + 1;
        let mut next = vec![left];
        for (y, above) in b.chars().zip(row.windows(2)) {
            let [diagonal, up] = above else { continue };
            left = (diagonal + usize::from(x != y)).min(up + 1).min(left + 1);
            next.push(left);
        }
        row = next;
    }
    row.last().copied().unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_field_has_its_camel_case_spelling() {
        assert_eq!(camel_case("max_request_body_bytes"), "maxRequestBodyBytes");
        assert_eq!(camel_case("rules"), "rules");
    }

    #[test]
    fn edits_are_counted() {
        for (a, b, distance) in
            [("", "", 0), ("", "abc", 3), ("abc", "", 3), ("kitten", "sitting", 3), ("é", "e", 1)]
        {
            assert_eq!(edit_distance(a, b), distance, "{a} {b}");
        }
    }

    #[test]
    fn only_a_near_name_is_suggested() {
        let allowed = ["lock_ttl", "record_ttl", "mode"];
        for (given, suggestion) in [
            ("lock_tll", Some("lock_ttl")),
            ("lockTTL", Some("lock_ttl")),
            ("lock-ttl", Some("lock_ttl")),
            ("recordttl", Some("record_ttl")),
            ("modes", Some("mode")),
            ("colour", None),
            ("", None),
        ] {
            assert_eq!(nearest(given, &allowed), suggestion, "{given}");
        }
    }

    #[test]
    fn a_strange_name_does_not_break_the_path() {
        assert_eq!(member_path("a", "b"), "a.b");
        assert_eq!(member_path("", "b"), "b");
        assert_eq!(member_path("a", "b.c\n"), r#"a["b.c\n"]"#);
        assert_eq!(member_path("", ""), r#"[""]"#);
        assert!(member_path("a", &"x".repeat(5000)).len() < 100);
    }
}
