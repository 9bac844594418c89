//! A JSON tree that keeps what `serde_json::Value` loses: members given twice, and their order.

use std::fmt::{self, Write as _};

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

/// Longest excerpt of a value in a message, in characters.
const EXCERPT: usize = 64;

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Json {
    Null,
    Bool(bool),
    /// An integer written as one.
    Integer(i128),
    /// Anything with a fraction or an exponent; a `google.protobuf.Struct` has only these.
    Float(f64),
    Text(String),
    List(Vec<Json>),
    /// Members as written, repeats included.
    Object(Vec<(String, Json)>),
}

impl Json {
    /// Parses a whole document. Nesting is bounded by serde_json (128), and so is every recursion over the tree.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, String> {
        // A field tag of a protobuf Struct is a line feed, so JSON is tried where both could be meant.
        if bytes.first() == Some(&b'\n')
            && serde_json::from_slice::<serde::de::IgnoredAny>(bytes).is_err()
            && let Some(tree) = super::protobuf::parse_struct(bytes)
        {
            return Ok(tree);
        }
        if bytes.iter().all(u8::is_ascii_whitespace) {
            return Err("empty, expected a JSON object".to_owned());
        }
        let text = std::str::from_utf8(bytes)
            .map_err(|error| format!("not UTF-8 from byte {} on, expected JSON", error.valid_up_to()))?;
        serde_json::from_str(text).map_err(|error| format!("not valid JSON: {error}"))
    }

    /// The value as JSON on one line, cut off after [`EXCERPT`] characters.
    pub(super) fn excerpt(&self) -> String {
        let mut excerpt = Excerpt::default();
        // A full excerpt stops the rendering; that is its only error.
        let _ = self.render(&mut excerpt);
        excerpt.text
    }

    fn render(&self, out: &mut Excerpt) -> fmt::Result {
        match self {
            Self::Null => out.write_str("null"),
            Self::Bool(value) => write!(out, "{value}"),
            Self::Integer(value) => write!(out, "{value}"),
            Self::Float(value) => render_float(*value, out),
            Self::Text(text) => render_text(text, out),
            Self::List(items) => {
                out.write_char('[')?;
                for (index, item) in items.iter().enumerate() {
                    if index > 0 {
                        out.write_str(", ")?;
                    }
                    item.render(out)?;
                }
                out.write_char(']')
            }
            Self::Object(members) => {
                out.write_char('{')?;
                for (index, (name, value)) in members.iter().enumerate() {
                    if index > 0 {
                        out.write_str(", ")?;
                    }
                    render_text(name, out)?;
                    out.write_str(": ")?;
                    value.render(out)?;
                }
                out.write_char('}')
            }
        }
    }
}

/// A number as an operator recognizes it: up to fifteen digits before and six behind the point.
fn render_float(value: f64, out: &mut Excerpt) -> fmt::Result {
    const EXACT: f64 = 1e15;
    const MILLIONTHS: f64 = 1e6;
    if value.is_nan() {
        return out.write_str("NaN");
    }
    if value < 0.0 {
        out.write_char('-')?;
    }
    let value = value.abs();
    if value >= EXACT {
        return out.write_str("1e15 or more");
    }
    let whole = value.trunc();
    let millionths = ((value - whole) * MILLIONTHS).trunc();
    // In bounds: checked above.
    let (whole, millionths) = (whole as u64, millionths as u64);
    if millionths % 100_000 == 0 {
        write!(out, "{whole}.{}", millionths / 100_000)
    } else {
        write!(out, "{whole}.{millionths:06}")
    }
}

/// `text` as a JSON string on one line, cut off after [`EXCERPT`] characters.
pub(super) fn quoted(text: &str) -> String {
    let mut excerpt = Excerpt::default();
    let _ = render_text(text, &mut excerpt);
    excerpt.text
}

fn render_text(text: &str, out: &mut Excerpt) -> fmt::Result {
    out.write_char('"')?;
    for c in text.chars() {
        match c {
            '"' | '\\' => write!(out, "\\{c}")?,
            '\n' => out.write_str("\\n")?,
            '\t' => out.write_str("\\t")?,
            _ if c.is_control() => write!(out, "\\u{:04x}", u32::from(c))?,
            _ => out.write_char(c)?,
        }
    }
    out.write_char('"')
}

#[derive(Default)]
struct Excerpt {
    text: String,
    length: usize,
}

impl fmt::Write for Excerpt {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for c in text.chars() {
            if self.length >= EXCERPT {
                self.text.push('…');
                return Err(fmt::Error);
            }
            self.text.push(c);
            self.length += 1;
        }
        Ok(())
    }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(JsonVisitor)
    }
}

struct JsonVisitor;

impl<'de> Visitor<'de> for JsonVisitor {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Json, E> {
        Ok(Json::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Json, E> {
        Ok(Json::Integer(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Json, E> {
        Ok(Json::Integer(value.into()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Json, E> {
        Ok(Json::Float(value))
    }

    fn visit_str<E>(self, value: &str) -> Result<Json, E> {
        Ok(Json::Text(value.to_owned()))
    }

    fn visit_string<E>(self, value: String) -> Result<Json, E> {
        Ok(Json::Text(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Json, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element()? {
            list.push(item);
        }
        Ok(Json::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Json, A::Error> {
        let mut members = Vec::new();
        while let Some(member) = entries.next_entry()? {
            members.push(member);
        }
        Ok(Json::Object(members))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_given_twice_are_both_kept() {
        let tree = Json::parse(br#"{"a": 1, "a": 2}"#).unwrap();
        let members = vec![("a".to_owned(), Json::Integer(1)), ("a".to_owned(), Json::Integer(2))];
        assert_eq!(tree, Json::Object(members));
    }

    #[test]
    fn a_hundred_thousand_open_brackets_are_an_error_and_not_a_crash() {
        for opening in ["[", "{\"a\":"] {
            let error = Json::parse(opening.repeat(100_000).as_bytes()).unwrap_err();
            assert!(error.contains("recursion limit"), "{error}");
        }
    }

    #[test]
    fn what_is_not_one_json_document_is_refused() {
        for text in ["{}{}", "{", "{} x", "'a'", "{\"a\": 1,}", "NaN", "1e999", "store: {}"] {
            assert!(Json::parse(text.as_bytes()).unwrap_err().starts_with("not valid JSON"), "{text}");
        }
        assert_eq!(Json::parse(b" \n").unwrap_err(), "empty, expected a JSON object");
        assert_eq!(Json::parse(b"{\"a\xff").unwrap_err(), "not UTF-8 from byte 3 on, expected JSON");
    }

    #[test]
    fn an_excerpt_stays_on_one_line_and_is_cut_off() {
        let tree = Json::parse(br#"{"a": [1, -2.5, null, true, "x\ny\"\u007f"]}"#).unwrap();
        assert_eq!(tree.excerpt(), r#"{"a": [1, -2.5, null, true, "x\ny\"\u007f"]}"#);

        let long = Json::Text("é".repeat(1000)).excerpt();
        assert_eq!(long.chars().count(), 65);
        assert!(long.ends_with("é…"), "{long}");
    }
}
