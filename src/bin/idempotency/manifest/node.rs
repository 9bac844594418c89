//! A YAML or JSON tree that knows the line of each node.

use saphyr::{LoadableYamlNode as _, MarkedYaml, Scalar, YamlData};
use serde_json::json;

/// Deeper nesting is refused, as Envoy's own reader does.
const DEEPEST: usize = 100;

#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    /// From 1.
    pub line: usize,
    pub value: Value,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    Null,
    Bool(bool),
    Integer(i64),
    Float(f64),
    Text(String),
    List(Vec<Node>),
    Map(Vec<(String, Node)>),
}

impl Node {
    /// Every document of a YAML stream; JSON is one.
    pub fn parse_all(text: &str) -> Result<Vec<Self>, String> {
        let documents = MarkedYaml::load_from_str(text).map_err(|error| error.to_string())?;
        documents.iter().map(|document| Self::from_yaml(document, 0)).collect()
    }

    fn from_yaml(yaml: &MarkedYaml<'_>, depth: usize) -> Result<Self, String> {
        let line = yaml.span.start.line();
        if depth > DEEPEST {
            return Err(format!("line {line}: nested deeper than {DEEPEST} levels"));
        }
        let value = match &yaml.data {
            YamlData::Value(scalar) => from_scalar(scalar),
            YamlData::Representation(text, ..) => Value::Text(text.to_string()),
            YamlData::Sequence(items) => Value::List(
                items.iter().map(|item| Self::from_yaml(item, depth + 1)).collect::<Result<_, _>>()?,
            ),
            YamlData::Mapping(members) => {
                let mut map = Vec::with_capacity(members.len());
                for (name, value) in members {
                    map.push((name_of(name), Self::from_yaml(value, depth + 1)?));
                }
                Value::Map(map)
            }
            YamlData::Tagged(_, node) => return Self::from_yaml(node, depth + 1),
            YamlData::Alias(_) => return Err(format!("line {line}: an alias of an unknown anchor")),
            YamlData::BadValue => return Err(format!("line {line}: not a YAML value")),
        };
        Ok(Self { line, value })
    }

    /// A member, by its proto name or the JSON spelling of it.
    pub fn get(&self, name: &str) -> Option<&Self> {
        let Value::Map(members) = &self.value else { return None };
        let camel = camel_case(name);
        members.iter().find(|(spelled, _)| spelled == name || *spelled == camel).map(|(_, node)| node)
    }

    /// A member of a member of …
    pub fn at(&self, names: &[&str]) -> Option<&Self> {
        names.iter().try_fold(self, |node, name| node.get(name))
    }

    pub fn members(&self) -> &[(String, Self)] {
        if let Value::Map(members) = &self.value { members } else { &[] }
    }

    pub fn items(&self) -> &[Self] {
        if let Value::List(items) = &self.value { items } else { &[] }
    }

    /// The items of a member that is a list.
    pub fn list(&self, name: &str) -> &[Self] {
        self.get(name).map_or(&[], Self::items)
    }

    pub fn text(&self) -> Option<&str> {
        if let Value::Text(text) = &self.value { Some(text) } else { None }
    }

    /// A member that is a text.
    pub fn text_of(&self, name: &str) -> Option<&str> {
        self.get(name).and_then(Self::text)
    }

    pub fn is_true(&self) -> bool {
        self.value == Value::Bool(true)
    }

    /// Whether a member is `true`.
    pub fn flag(&self, name: &str) -> bool {
        self.get(name).is_some_and(Self::is_true)
    }

    pub fn integer(&self) -> Option<u64> {
        match &self.value {
            Value::Integer(number) => u64::try_from(*number).ok(),
            Value::Text(text) => text.parse().ok(),
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
            Value::Float(number) if number.fract() == 0.0 && *number >= 0.0 => Some(*number as u64),
            Value::Float(_) | Value::Null | Value::Bool(_) | Value::List(_) | Value::Map(_) => None,
        }
    }

    /// A `google.protobuf.Duration` in seconds.
    pub fn seconds(&self) -> Option<f64> {
        self.text()?.strip_suffix('s')?.parse().ok()
    }

    /// The last part of the `@type` of a typed extension, and where its fields are; a `TypedStruct` names them apart.
    pub fn typed(&self) -> Option<(&str, &Self)> {
        fn short(url: &str) -> &str {
            url.rsplit('.').next().unwrap_or(url)
        }
        let kind = short(self.text_of("@type")?);
        if kind == "TypedStruct" {
            return Some((short(self.text_of("type_url")?), self.get("value")?));
        }
        Some((kind, self))
    }

    pub fn to_json(&self) -> serde_json::Value {
        match &self.value {
            Value::Null => serde_json::Value::Null,
            Value::Bool(value) => json!(value),
            Value::Integer(number) => json!(number),
            Value::Float(number) => json!(number),
            Value::Text(text) => json!(text),
            Value::List(items) => items.iter().map(Self::to_json).collect(),
            Value::Map(members) => {
                members.iter().map(|(name, node)| (name.clone(), node.to_json())).collect()
            }
        }
    }
}

fn from_scalar(scalar: &Scalar<'_>) -> Value {
    match scalar {
        Scalar::Null => Value::Null,
        Scalar::Boolean(value) => Value::Bool(*value),
        Scalar::Integer(number) => Value::Integer(*number),
        Scalar::FloatingPoint(number) => Value::Float(number.into_inner()),
        Scalar::String(text) => Value::Text(text.to_string()),
    }
}

fn name_of(name: &MarkedYaml<'_>) -> String {
    match &name.data {
        YamlData::Value(Scalar::String(text)) => text.to_string(),
        YamlData::Value(Scalar::Integer(number)) => number.to_string(),
        YamlData::Value(Scalar::Boolean(value)) => value.to_string(),
        YamlData::Representation(text, ..) => text.to_string(),
        YamlData::Value(Scalar::Null | Scalar::FloatingPoint(_))
        | YamlData::Sequence(_)
        | YamlData::Mapping(_)
        | YamlData::Tagged(..)
        | YamlData::Alias(_)
        | YamlData::BadValue => String::new(),
    }
}

/// The JSON spelling of a name.
pub fn camel_case(name: &str) -> String {
    let mut camel = String::with_capacity(name.len());
    let mut upper = false;
    for c in name.chars() {
        if c == '_' {
            upper = true;
        } else if std::mem::take(&mut upper) {
            camel.push(c.to_ascii_uppercase());
        } else {
            camel.push(c);
        }
    }
    camel
}
