//! What the filter itself sends to a client: refusals and replays.

pub mod problem;
pub mod replay;

/// A reply made by the filter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalReply {
    /// The `:status`.
    pub status: u16,
    /// Header lines, serialized as the host takes them.
    pub headers: Vec<u8>,
    /// Holds the body.
    pub content: Vec<u8>,
    /// Where the body starts in `content`: a replay sends its body out of the record without copying it.
    pub body_at: usize,
    /// `response.code_details`.
    pub code_details: &'static str,
    /// What has to be put right once Envoy has made its response of it.
    pub content_type: ContentType,
}

impl LocalReply {
    /// The body.
    #[must_use]
    pub fn body(&self) -> &[u8] {
        self.content.get(self.body_at..).unwrap_or_default()
    }
}

/// Envoy adds `text/plain` to a local reply with a body and no content-type, and removes the content-type of one
/// without a body (`source/common/http/utility.cc`, `prepareLocalReply`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ContentType {
    /// As Envoy leaves it.
    Kept,
    /// The kept response had none.
    Absent,
    /// The kept response had this one, and no body.
    Exactly(Vec<u8>),
}
