//! Who the caller is: the parts of a rule's scope, taken from one request and framed for hashing.
//!
//! Nothing here falls back: a part that can't be had is an error, never a scope that callers share. No error
//! and no `Debug` output holds a part's value. How far a source can be trusted is the operator's choice.

use std::fmt;

use crate::config::{CertificateField, Rule, Scope, ScopePart};
use crate::headers::{RequestHead, trim_ows};
use crate::key::frame_length;

/// Longest Authorization value, in bytes; `max_scope_length` is meant for identifiers, and tokens are longer.
pub const MAX_AUTHORIZATION_LENGTH: usize = 16 * 1024;

const JWT_AUTHN: &str = "envoy.filters.http.jwt_authn";

/// A request's scope, framed: whether it is shared or the number of parts, then each part's source, name and
/// value.
#[derive(Clone, PartialEq, Eq)]
pub struct ScopeValues {
    framed: Vec<u8>,
}

impl ScopeValues {
    /// What a store key is hashed over: raw values, never to be logged or stored. No framing begins another.
    pub(crate) fn framed(&self) -> &[u8] {
        &self.framed
    }

    fn push_piece(&mut self, piece: &[u8]) {
        self.framed.extend_from_slice(&frame_length(piece.len()));
        self.framed.extend_from_slice(piece);
    }
}

impl fmt::Debug for ScopeValues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ScopeValues(..)")
    }
}

/// Why a request has no scope: which part, and the rule it broke.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScopeError {
    /// The part's source and name, such as `header x-account-id`.
    pub part: String,
    /// The rule it broke.
    pub fault: ScopeFault,
}

/// Which rule a part of the scope broke. Indexes count bytes of the value from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScopeFault {
    /// The request doesn't have it. The host doesn't tell an absent attribute from an empty one.
    Missing,
    /// It is there, without a value.
    Empty,
    /// The header comes on more than one line.
    SeveralLines,
    /// A comma: a list, or lines that Envoy or a proxy joined (RFC 9110 section 5.3).
    List {
        /// Where the comma is.
        index: usize,
    },
    /// A space.
    Space {
        /// Where it is.
        index: usize,
    },
    /// A control character.
    ControlCharacter {
        /// Where it is.
        index: usize,
    },
    /// Longer than allowed.
    TooLong {
        /// The bound.
        max_length: usize,
    },
}

impl ScopeFault {
    /// A name for metrics and logs.
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match self {
            ScopeFault::Missing => "missing",
            ScopeFault::Empty => "empty",
            ScopeFault::SeveralLines => "several_lines",
            ScopeFault::List { .. } => "list",
            ScopeFault::Space { .. } => "space",
            ScopeFault::ControlCharacter { .. } => "control_character",
            ScopeFault::TooLong { .. } => "too_long",
        }
    }
}

impl fmt::Display for ScopeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.part)?;
        match self.fault {
            ScopeFault::Missing => f.write_str("missing"),
            ScopeFault::Empty => f.write_str("empty"),
            ScopeFault::SeveralLines => f.write_str("more than one line"),
            ScopeFault::List { index } => write!(f, "a comma at byte {index}"),
            ScopeFault::Space { index } => write!(f, "a space at byte {index}"),
            ScopeFault::ControlCharacter { index } => write!(f, "a control character at byte {index}"),
            ScopeFault::TooLong { max_length } => write!(f, "longer than {max_length} bytes"),
        }
    }
}

impl std::error::Error for ScopeError {}

/// Takes every part of the rule's scope from the request.
///
/// Each part is framed with its source and name, so `x-account-id: alice` is not `sub: alice`.
///
/// # Errors
///
/// The first part that is missing or broken.
pub fn resolve_scope(rule: &Rule, head: &RequestHead<'_>) -> Result<ScopeValues, ScopeError> {
    let parts = match &rule.scope {
        Scope::Shared => return Ok(ScopeValues { framed: vec![0] }),
        Scope::Parts(parts) => parts,
    };
    let mut values = ScopeValues { framed: vec![1] };
    values.framed.extend_from_slice(&frame_length(parts.len()));
    for part in parts {
        push_part(&mut values, part, rule.max_scope_length, head)
            .map_err(|fault| ScopeError { part: label(part), fault })?;
    }
    Ok(values)
}

/// Which attribute of the host a part is; empty for one that is none.
#[must_use]
pub fn attribute_path(part: &ScopePart) -> Vec<&str> {
    match part {
        ScopePart::JwtClaim { claim, metadata_key } => {
            vec!["metadata", "filter_metadata", JWT_AUTHN, metadata_key, claim]
        }
        ScopePart::PeerCertificate(field) => vec!["connection", certificate_property(*field)],
        ScopePart::Property(path) => path.iter().map(String::as_str).collect(),
        ScopePart::Header(_) | ScopePart::Authorization | ScopePart::Constant(_) => Vec::new(),
    }
}

fn push_part(
    values: &mut ScopeValues,
    part: &ScopePart,
    max_length: usize,
    head: &RequestHead<'_>,
) -> Result<(), ScopeFault> {
    match part {
        ScopePart::Header(name) => {
            push_source(values, 1, &[name]);
            values.push_piece(header_value(head, name, max_length)?);
        }
        ScopePart::Authorization => {
            push_source(values, 2, &[]);
            values.push_piece(authorization_value(head)?);
        }
        ScopePart::JwtClaim { claim, metadata_key } => {
            push_source(values, 3, &[metadata_key, claim]);
            values.push_piece(&attribute_value(head, part, max_length)?);
        }
        ScopePart::PeerCertificate(field) => {
            push_source(values, 4, &[certificate_property(*field)]);
            values.push_piece(&attribute_value(head, part, max_length)?);
        }
        ScopePart::Property(path) => {
            push_source(values, 5, &path.iter().map(String::as_str).collect::<Vec<_>>());
            values.push_piece(&attribute_value(head, part, max_length)?);
        }
        ScopePart::Constant(value) => {
            push_source(values, 6, &[]);
            // Its length was bounded at load: `max_scope_length` is about what a request brings.
            values.push_piece(check_length(value.as_bytes(), usize::MAX)?);
        }
    }
    Ok(())
}

fn push_source(values: &mut ScopeValues, source: u8, names: &[&str]) {
    values.framed.push(source);
    values.framed.extend_from_slice(&frame_length(names.len()));
    for name in names {
        values.push_piece(name.as_bytes());
    }
}

fn header_value<'a>(head: &RequestHead<'a>, name: &str, max_length: usize) -> Result<&'a [u8], ScopeFault> {
    let value = check_length(the_one_line(head, name)?, max_length)?;
    for (index, byte) in value.iter().enumerate() {
        match byte {
            b' ' => return Err(ScopeFault::Space { index }),
            // Envoy joins repeated lines of some headers itself, with a bare comma.
            b',' => return Err(ScopeFault::List { index }),
            0x00..=0x1f | 0x7f => return Err(ScopeFault::ControlCharacter { index }),
            0x21..=0x7e | 0x80..=0xff => {}
        }
    }
    Ok(value)
}

fn authorization_value<'a>(head: &RequestHead<'a>) -> Result<&'a [u8], ScopeFault> {
    let value = check_length(the_one_line(head, "authorization")?, MAX_AUTHORIZATION_LENGTH)?;
    let find = |wanted: fn(&u8) -> bool| value.iter().position(wanted);
    if let Some(index) = find(u8::is_ascii_control) {
        return Err(ScopeFault::ControlCharacter { index });
    }
    // Envoy joins repeated Authorization lines with a comma. Credentials of one token can't hold one
    // (RFC 6750 section 2.1, RFC 7617 section 2); those with parameters, such as Digest, do.
    let scheme = value.split(|byte| *byte == b' ').next().unwrap_or_default();
    if [&b"bearer"[..], b"basic"].iter().any(|one| scheme.eq_ignore_ascii_case(one))
        && let Some(index) = find(|byte| *byte == b',')
    {
        return Err(ScopeFault::List { index });
    }
    Ok(value)
}

fn the_one_line<'a>(head: &RequestHead<'a>, name: &str) -> Result<&'a [u8], ScopeFault> {
    let mut lines = head.headers.lines(name);
    let line = lines.next().ok_or(ScopeFault::Missing)?;
    if lines.next().is_some() {
        return Err(ScopeFault::SeveralLines);
    }
    let (_, value) = trim_ows(line);
    Ok(value)
}

/// Hashed as the host serializes it: a string is raw, a number 8 bytes, a boolean one.
fn attribute_value(
    head: &RequestHead<'_>,
    part: &ScopePart,
    max_length: usize,
) -> Result<Vec<u8>, ScopeFault> {
    let value = head.attributes.attribute(&attribute_path(part)).ok_or(ScopeFault::Missing)?;
    check_length(&value, max_length)?;
    Ok(value)
}

fn check_length(value: &[u8], max_length: usize) -> Result<&[u8], ScopeFault> {
    if value.is_empty() {
        return Err(ScopeFault::Empty);
    }
    if value.len() > max_length {
        return Err(ScopeFault::TooLong { max_length });
    }
    Ok(value)
}

fn certificate_property(field: CertificateField) -> &'static str {
    match field {
        CertificateField::UriSan => "uri_san_peer_certificate",
        CertificateField::Subject => "subject_peer_certificate",
        CertificateField::Sha256 => "sha256_peer_certificate_digest",
    }
}

/// A part's source and name, such as `header x-account-id`.
#[must_use]
pub fn label(part: &ScopePart) -> String {
    match part {
        ScopePart::Header(name) => format!("header {name}"),
        ScopePart::Authorization => "header authorization".to_owned(),
        ScopePart::JwtClaim { claim, .. } => format!("jwt claim {claim}"),
        ScopePart::PeerCertificate(field) => format!("connection.{}", certificate_property(*field)),
        ScopePart::Property(path) => format!("property {}", path.join(".")),
        ScopePart::Constant(_) => "constant".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::fixture::{self, Request};
    use proptest::prelude::*;

    fn header(name: &str) -> ScopePart {
        ScopePart::Header(name.to_owned())
    }

    fn claim(claim: &str) -> ScopePart {
        ScopePart::JwtClaim { claim: claim.to_owned(), metadata_key: "payload".to_owned() }
    }

    fn property(path: &[&str]) -> ScopePart {
        ScopePart::Property(path.iter().map(|name| (*name).to_owned()).collect())
    }

    fn resolve(parts: &[ScopePart], request: &Request) -> Result<ScopeValues, ScopeError> {
        let mut rule = fixture::rule();
        rule.scope = Scope::Parts(parts.to_vec());
        resolve_scope(&rule, &request.head())
    }

    fn fault(part: ScopePart, request: &Request) -> ScopeFault {
        resolve(&[part], request).unwrap_err().fault
    }

    fn jwt_path(claim: &str) -> [&str; 5] {
        ["metadata", "filter_metadata", "envoy.filters.http.jwt_authn", "payload", claim]
    }

    /// E01
    #[test]
    fn two_callers_have_two_scopes() {
        let parts = [header("x-account-id")];
        let alice = resolve(&parts, &Request::new().line("x-account-id", "alice")).unwrap();
        let bob = resolve(&parts, &Request::new().line("x-account-id", "bob")).unwrap();
        let again = resolve(&parts, &Request::new().line("x-account-id", "alice")).unwrap();
        assert_ne!(alice, bob);
        assert_eq!(alice, again);
    }

    /// E10
    #[test]
    fn the_same_subject_under_another_tenant_is_another_scope() {
        let parts = [claim("sub"), header("x-org")];
        let request = |org| Request::new().attribute(&jwt_path("sub"), b"alice").line("x-org", org);
        assert_ne!(resolve(&parts, &request("1")).unwrap(), resolve(&parts, &request("2")).unwrap());
    }

    /// E04
    #[test]
    fn a_claim_survives_a_new_token_and_a_credential_does_not() {
        let request =
            |token| Request::new().attribute(&jwt_path("sub"), b"alice").line("authorization", token);
        let (old, new) = (request("Bearer old"), request("Bearer new"));
        assert_eq!(resolve(&[claim("sub")], &old).unwrap(), resolve(&[claim("sub")], &new).unwrap());
        let by_token = [ScopePart::Authorization];
        assert_ne!(resolve(&by_token, &old).unwrap(), resolve(&by_token, &new).unwrap());
    }

    #[test]
    fn the_same_value_from_another_source_or_name_is_another_scope() {
        let request = Request::new()
            .line("x-account-id", "alice")
            .line("x-user", "alice")
            .line("authorization", "alice")
            .attribute(&jwt_path("sub"), b"alice")
            .attribute(&jwt_path("azp"), b"alice")
            .attribute(&["connection", "uri_san_peer_certificate"], b"alice")
            .attribute(&["connection", "subject_peer_certificate"], b"alice")
            .attribute(&["a", "b"], b"alice")
            .attribute(&["ab"], b"alice");
        let sources = [
            vec![header("x-account-id")],
            vec![header("x-user")],
            vec![ScopePart::Authorization],
            vec![claim("sub")],
            vec![claim("azp")],
            vec![ScopePart::PeerCertificate(CertificateField::UriSan)],
            vec![ScopePart::PeerCertificate(CertificateField::Subject)],
            vec![property(&["connection", "uri_san_peer_certificate"])],
            vec![property(&["a", "b"])],
            vec![property(&["ab"])],
            vec![ScopePart::Constant("alice".to_owned())],
            vec![header("x-account-id"), header("x-user")],
            vec![header("x-user"), header("x-account-id")],
        ];
        let mut scopes: Vec<_> =
            sources.iter().map(|parts| resolve(parts, &request).unwrap().framed).collect();
        let mut rule = fixture::rule();
        rule.scope = Scope::Shared;
        scopes.push(resolve_scope(&rule, &request.head()).unwrap().framed);
        for (at, one) in scopes.iter().enumerate() {
            let begun: Vec<_> = scopes.iter().filter(|other| other.starts_with(one)).collect();
            assert_eq!(begun, [one], "number {at} begins another, or is one");
        }
    }

    #[test]
    fn a_missing_part_is_an_error_never_a_shared_scope() {
        for part in [
            header("x-account-id"),
            ScopePart::Authorization,
            claim("sub"),
            ScopePart::PeerCertificate(CertificateField::Sha256),
            property(&["connection", "id"]),
        ] {
            let request = Request::new().line("x-other", "alice");
            assert_eq!(fault(part.clone(), &request), ScopeFault::Missing, "{part:?}");
            let both = [ScopePart::Constant("tenant".to_owned()), part];
            assert_eq!(resolve(&both, &request).unwrap_err().fault, ScopeFault::Missing);
        }
    }

    #[test]
    fn an_empty_part_is_an_error() {
        for value in ["", " ", "\t "] {
            let request = Request::new().line("x-account-id", value).line("authorization", value);
            assert_eq!(fault(header("x-account-id"), &request), ScopeFault::Empty);
            assert_eq!(fault(ScopePart::Authorization, &request), ScopeFault::Empty);
        }
        let request = Request::new().attribute(&jwt_path("sub"), b"");
        assert_eq!(fault(claim("sub"), &request), ScopeFault::Empty);
        assert_eq!(fault(ScopePart::Constant(String::new()), &request), ScopeFault::Empty);
    }

    #[test]
    fn a_header_part_on_two_lines_is_an_error_however_it_arrives() {
        let account = header("x-account-id");
        let two = Request::new().line("x-account-id", "a").line("X-Account-Id", "a");
        assert_eq!(fault(account.clone(), &two), ScopeFault::SeveralLines);
        let joined = Request::new().line("x-account-id", "a,a");
        assert_eq!(fault(account.clone(), &joined), ScopeFault::List { index: 1 });
        let two = Request::new().line("authorization", "Bearer a").line("authorization", "Bearer b");
        assert_eq!(fault(ScopePart::Authorization, &two), ScopeFault::SeveralLines);
        for joined in ["Bearer a,Bearer b", "basic YQ==,x", "BEARER a, b"] {
            let request = Request::new().line("authorization", joined);
            assert!(matches!(fault(ScopePart::Authorization, &request), ScopeFault::List { .. }), "{joined}");
        }
    }

    #[test]
    fn spaces_and_controls_are_refused_in_headers_and_allowed_elsewhere() {
        for (value, expected) in [
            ("a b", ScopeFault::Space { index: 1 }),
            ("a\tb", ScopeFault::ControlCharacter { index: 1 }),
            ("\x7f", ScopeFault::ControlCharacter { index: 0 }),
            ("a\0", ScopeFault::ControlCharacter { index: 1 }),
        ] {
            assert_eq!(fault(header("x"), &Request::new().line("x", value)), expected);
        }
        let tab = Request::new().line("authorization", "Bearer\ta");
        assert_eq!(fault(ScopePart::Authorization, &tab), ScopeFault::ControlCharacter { index: 6 });

        let subject = ScopePart::PeerCertificate(CertificateField::Subject);
        let request = Request::new()
            .line("authorization", "Digest username=\"a\", realm=\"b\"")
            .line("x-latin1", b"J\xfcrgen")
            .attribute(&["connection", "subject_peer_certificate"], b"CN=a b,O=c\n")
            .attribute(&jwt_path("n"), &42.0_f64.to_le_bytes())
            .attribute(&jwt_path("no"), &[0]);
        for part in [ScopePart::Authorization, header("x-latin1"), subject, claim("n"), claim("no")] {
            assert!(resolve(std::slice::from_ref(&part), &request).is_ok(), "{part:?}");
        }
    }

    #[test]
    fn whitespace_around_a_header_is_no_part_of_the_scope() {
        let plain = resolve(&[header("x")], &Request::new().line("x", "alice")).unwrap();
        assert_eq!(resolve(&[header("x")], &Request::new().line("x", " alice\t")).unwrap(), plain);
    }

    #[test]
    fn lengths_are_bounded() {
        let max_length = fixture::rule().max_scope_length;
        let (fits, long) = ("a".repeat(max_length), "a".repeat(max_length + 1));
        let request =
            |value: &str| Request::new().line("x", value).attribute(&jwt_path("sub"), value.as_bytes());
        for part in [header("x"), claim("sub")] {
            assert!(resolve(std::slice::from_ref(&part), &request(&fits)).is_ok());
            assert_eq!(fault(part, &request(&long)), ScopeFault::TooLong { max_length });
        }
        let token = |length| Request::new().line("authorization", "a".repeat(length));
        assert!(resolve(&[ScopePart::Authorization], &token(MAX_AUTHORIZATION_LENGTH)).is_ok());
        assert_eq!(
            fault(ScopePart::Authorization, &token(MAX_AUTHORIZATION_LENGTH + 1)),
            ScopeFault::TooLong { max_length: MAX_AUTHORIZATION_LENGTH }
        );
    }

    /// E09
    #[test]
    fn errors_and_debug_output_name_the_part_and_not_its_value() {
        let request = Request::new().line("x-account-id", "SECRET SECRET");
        let error = resolve(&[header("x-account-id")], &request).unwrap_err();
        assert_eq!(error.to_string(), "header x-account-id: a space at byte 6");
        assert!(!format!("{error:?}").contains("SECRET"));
        let scope = resolve(&[ScopePart::Constant("SECRET".to_owned())], &request).unwrap();
        assert_eq!(format!("{scope:?}"), "ScopeValues(..)");
        let request = Request::new().attribute(&jwt_path("sub"), "SECRET".repeat(100).as_bytes());
        let error = resolve(&[claim("sub")], &request).unwrap_err();
        assert_eq!(error.to_string(), "jwt claim sub: longer than 255 bytes");
    }

    proptest! {
        #[test]
        fn any_header_value_is_taken_or_refused(value in proptest::collection::vec(any::<u8>(), 0..32)) {
            let request = Request::new().line("x", &value).line("authorization", &value);
            for part in [header("x"), ScopePart::Authorization] {
                if let Ok(scope) = resolve(&[part], &request) {
                    prop_assert!(scope.framed.ends_with(trim_ows(&value).1));
                }
            }
        }

        #[test]
        fn different_parts_have_different_framings(
            one in proptest::collection::vec("[a-b]{1,3}", 1..4),
            other in proptest::collection::vec("[a-b]{1,3}", 1..4),
        ) {
            let resolve = |values: &[String]| {
                let parts: Vec<_> = values.iter().cloned().map(ScopePart::Constant).collect();
                resolve(&parts, &Request::new()).unwrap()
            };
            prop_assert_eq!(resolve(&one) == resolve(&other), one == other);
        }
    }
}
