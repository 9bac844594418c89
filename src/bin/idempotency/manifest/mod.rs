//! Files that hold plugin configurations: read, and searched for the filter and what stands around it.

mod find;
mod node;

use std::io::Read as _;
use std::path::Path;

pub use find::{Chain, Filter, Host, Manifest, Role};
pub use node::{Node, camel_case};

use crate::exit::Failure;

/// One file as it was given.
#[derive(Debug)]
pub struct File {
    pub name: String,
    pub bytes: Vec<u8>,
}

impl File {
    /// Reads a file; `-` is standard input.
    pub fn read(path: &Path) -> Result<Self, Failure> {
        let name = path.display().to_string();
        let mut bytes = Vec::new();
        let read = if name == "-" {
            std::io::stdin().read_to_end(&mut bytes).map(|_| bytes)
        } else {
            std::fs::read(path)
        };
        match read {
            Ok(bytes) => Ok(Self { name, bytes }),
            Err(error) => Err(Failure::usage(format!("{name}: {error}"))),
        }
    }

    /// What it is: Envoy's or a control plane's documents, or a plugin configuration by itself.
    pub fn content(&self) -> Result<Content, Failure> {
        let documents =
            std::str::from_utf8(&self.bytes).map_err(|error| error.to_string()).and_then(Node::parse_all);
        match documents {
            Ok(documents) if documents.iter().any(is_surrounding) => {
                Ok(Content::Manifest(Manifest::new(documents)))
            }
            // The loader says what is wrong with anything else that begins as its own format does.
            Ok(_) => Ok(Content::Plugin),
            Err(_)
                if self.bytes.trim_ascii_start().starts_with(b"{") || self.bytes.trim_ascii().is_empty() =>
            {
                Ok(Content::Plugin)
            }
            Err(error) => Err(Failure::usage(format!("{}: neither JSON nor YAML: {error}", self.name))),
        }
    }
}

/// What a file holds.
#[derive(Debug)]
pub enum Content {
    /// A plugin configuration and nothing else.
    Plugin,
    /// Documents that a plugin configuration may be in.
    Manifest(Manifest),
}

/// Whether a document is meant for Envoy or for Kubernetes, and not for the filter itself.
fn is_surrounding(document: &Node) -> bool {
    const MARKS: [&str; 9] = [
        "static_resources",
        "dynamic_resources",
        "bootstrap_extensions",
        "admin",
        "resources",
        "kind",
        "apiVersion",
        "filter_chains",
        "http_filters",
    ];
    MARKS.iter().any(|mark| document.get(mark).is_some())
}
