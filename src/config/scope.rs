//! Reading `scope`: who the caller is.

use super::fields::{Field, Object, got, list};
use super::json::Json;
use super::problem::Problems;
use super::values::{choice, scope_header, text, word};
use super::{CertificateField, Scope, ScopePart};

pub(super) const EXPECTED: &str = "\"shared\" or a list of sources such as [{\"header\": \"x-account-id\"}]";
const EXPECTED_PART: &str = "an object with one source, such as {\"header\": \"x-account-id\"}";
const SOURCES: &str =
    "exactly one of: header, authorization, jwt_claim, peer_certificate, property, constant";

/// Longest text of a source, in bytes.
const LONGEST_NAME: usize = 256;

pub(super) fn read_scope(json: &Json, path: &str, problems: &mut Problems) -> Option<Scope> {
    if word(json) == Some("shared") {
        return Some(Scope::Shared);
    }
    if matches!(json, Json::List(items) if items.is_empty()) {
        let message =
            format!("{}: without a source all callers would share one key space", got(json, EXPECTED));
        problems.refuse(path, message);
        return None;
    }
    list(json, path, EXPECTED, problems, read_part).map(Scope::Parts)
}

fn read_part(json: &Json, path: &str, problems: &mut Problems) -> Option<ScopePart> {
    let mut object = Object::begin(json, path, EXPECTED_PART, problems)?;

    let header = object.field("header", problems, scope_header);
    let authorization = object.field("authorization", problems, |json| match json {
        Json::Bool(true) => Ok(()),
        Json::Bool(false)
        | Json::Null
        | Json::Integer(_)
        | Json::Float(_)
        | Json::Text(_)
        | Json::List(_)
        | Json::Object(_) => Err(got(json, "true")),
    });
    let claim = object.field("jwt_claim", problems, text(1, LONGEST_NAME));
    let metadata_key = object.field("metadata_key", problems, text(1, LONGEST_NAME));
    let certificate = object.field(
        "peer_certificate",
        problems,
        choice(&[
            ("uri_san", CertificateField::UriSan),
            ("subject", CertificateField::Subject),
            ("sha256", CertificateField::Sha256),
        ]),
    );
    let property = object.nested("property", problems, read_property);
    let constant = object.field("constant", problems, text(1, LONGEST_NAME));
    object.finish(problems);

    let sources = [
        ("header", header.is_absent()),
        ("authorization", authorization.is_absent()),
        ("jwt_claim", claim.is_absent()),
        ("peer_certificate", certificate.is_absent()),
        ("property", property.is_absent()),
        ("constant", constant.is_absent()),
    ];
    let given: Vec<_> = sources.iter().filter(|(_, absent)| !absent).map(|(name, _)| *name).collect();
    match given.as_slice() {
        [] => problems.refuse(path, format!("got no source, expected {SOURCES}")),
        [_] => {}
        _ => problems.refuse(
            path,
            format!("got {}, expected {SOURCES}: list them as separate parts", given.join(" and ")),
        ),
    }
    match (claim.is_absent(), metadata_key.is_absent()) {
        (false, true) => problems.refuse(
            &format!("{path}.metadata_key"),
            "missing, expected the name that payload_in_metadata of the jwt_authn filter gives",
        ),
        (true, false) => problems.refuse(&format!("{path}.metadata_key"), "only goes with jwt_claim"),
        (true, true) | (false, false) => {}
    }

    let claim = match (claim, metadata_key) {
        (Field::Given { value: claim, .. }, Field::Given { value: metadata_key, .. }) => {
            Some(ScopePart::JwtClaim { claim, metadata_key })
        }
        _ => None,
    };
    let candidates = [
        header.given().map(ScopePart::Header),
        authorization.given().map(|()| ScopePart::Authorization),
        claim,
        certificate.given().map(ScopePart::PeerCertificate),
        property.given().map(ScopePart::Property),
        constant.given().map(ScopePart::Constant),
    ];
    candidates.into_iter().flatten().next()
}

/// An attribute's path; the host joins it with NUL, which `text` refuses as a control character.
fn read_property(json: &Json, path: &str, problems: &mut Problems) -> Option<Vec<String>> {
    const EXPECTED: &str =
        "the path of an Envoy attribute such as [\"connection\", \"requested_server_name\"]";
    let Json::List(items) = json else {
        problems.refuse(path, got(json, EXPECTED));
        return None;
    };
    if items.is_empty() {
        problems.refuse(path, got(json, EXPECTED));
        return None;
    }
    let mut parts = Vec::with_capacity(items.len());
    for (index, item) in items.iter().enumerate() {
        match text(1, LONGEST_NAME)(item) {
            Ok(part) => parts.push(part),
            Err(message) => problems.refuse(&format!("{path}[{index}]"), message),
        }
    }
    (parts.len() == items.len()).then_some(parts)
}
