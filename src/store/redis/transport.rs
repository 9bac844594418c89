//! What a batch looks like on its way to Redis: raw RESP over the link, or the dialect of an HTTP gateway.
//!
//! A transport encodes commands as one callout, and rewrites what answers it into what the link answers: RESP values and
//! the `+OK` of a QUIT. [`super::envelope`] then judges every answer alike.
//!
//! | transport | one callout | its answer |
//! |---|---|---|
//! | link | commands and QUIT | values and `+OK` |
//! | Webdis | one command: words with `/` between them, all percent-encoded, `.raw` at the end | one value; integers within arrays come as text |
//! | Upstash | `POST /pipeline`, a JSON array of commands | `resp2`: values, or an array of them; `base64`: a JSON array of `result` and `error` |
//! | Upstash, a command whose last word is not UTF-8 | `POST /word/word/…`, that word as the body | the same, for one command |

use std::borrow::Cow;

use super::envelope;
use super::resp::{Value, decode, encode_command, push_bulk, push_length};
use crate::config::json::Json;

/// Who takes the callouts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Transport {
    /// Envoy's own `redis_proxy`, behind the link.
    #[default]
    Link,
    /// Webdis.
    Webdis,
    /// The REST API of Upstash, or of somebody who speaks it, with answers as RESP2.
    UpstashResp2,
    /// The same with answers as JSON, strings in base64.
    UpstashBase64,
}

/// A callout's request, but for its authority and credentials.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Encoded {
    /// `:path`.
    pub path: String,
    /// Headers beside the pseudo-headers.
    pub headers: &'static [(&'static str, &'static str)],
    /// The body.
    pub body: Vec<u8>,
}

impl Transport {
    /// Operations that one callout can carry, if there is such a bound.
    #[must_use]
    pub const fn max_operations(self) -> Option<usize> {
        match self {
            Self::Webdis => Some(1),
            Self::Link | Self::UpstashResp2 | Self::UpstashBase64 => None,
        }
    }

    /// Whether a command that ends in these bytes needs a callout of its own: JSON has no bytes.
    #[must_use]
    pub fn sends_alone(self, last: &[u8]) -> bool {
        match self {
            Self::Link | Self::Webdis => false,
            Self::UpstashResp2 | Self::UpstashBase64 => std::str::from_utf8(last).is_err(),
        }
    }

    /// Whether an answer with this status can be one to the commands.
    #[must_use]
    pub const fn reads(self, status: u16) -> bool {
        match self {
            Self::Link | Self::Webdis => status == 200,
            // 400: a command that Redis refused.
            Self::UpstashResp2 | Self::UpstashBase64 => matches!(status, 200 | 400),
        }
    }

    /// The callout for these commands. There is one only where it says so above.
    #[must_use]
    pub fn encode(self, commands: &[Vec<Cow<'_, [u8]>>]) -> Encoded {
        let mut body = Vec::new();
        let mut path = "/".to_owned();
        let headers: &[_] = match self {
            Self::Link => {
                commands.iter().for_each(|argv| encode_command(&mut body, argv));
                envelope::seal(&mut body);
                &[]
            }
            Self::Webdis => {
                let mut line = String::new();
                commands.iter().flatten().for_each(|word| push_segment(&mut line, word));
                body.extend_from_slice(line.trim_start_matches('/').as_bytes());
                body.extend_from_slice(b".raw");
                &[]
            }
            Self::UpstashResp2 | Self::UpstashBase64 => {
                match commands {
                    [argv] if argv.last().is_some_and(|last| self.sends_alone(last)) => {
                        let (last, words) = argv.split_last().map_or((&[][..], &[][..]), |(l, w)| (&**l, w));
                        path.clear();
                        words.iter().for_each(|word| push_segment(&mut path, word));
                        body.extend_from_slice(last);
                    }
                    _ => {
                        path.push_str("pipeline");
                        push_json(&mut body, commands);
                    }
                }
                if self == Self::UpstashResp2 {
                    &[("upstash-response-format", "resp2")]
                } else {
                    &[("upstash-encoding", "base64")]
                }
            }
        };
        Encoded { path, headers, body }
    }

    /// The answer as the link would have given it. What is no answer stays none.
    #[must_use]
    pub fn as_of_link(self, answer: &[u8], commands: usize) -> Cow<'_, [u8]> {
        let mut values = match self {
            Self::Link => return Cow::Borrowed(answer),
            Self::UpstashBase64 => from_json(answer).unwrap_or_default(),
            Self::Webdis => answer.to_vec(),
            Self::UpstashResp2 => without_frame(answer, commands).unwrap_or(answer).to_vec(),
        };
        if !values.is_empty() {
            values.extend_from_slice(b"+OK\r\n");
        }
        Cow::Owned(values)
    }
}

fn push_segment(path: &mut String, word: &[u8]) {
    path.push('/');
    for byte in word {
        // A dot too: Webdis takes what follows the last one for the format it shall answer in.
        if byte.is_ascii_alphanumeric() {
            path.push(char::from(*byte));
        } else {
            path.push('%');
            for digit in [byte >> 4, byte & 15] {
                path.push(char::from_digit(u32::from(digit), 16).unwrap_or('0').to_ascii_uppercase());
            }
        }
    }
}

fn push_json(out: &mut Vec<u8>, commands: &[Vec<Cow<'_, [u8]>>]) {
    for (nth, argv) in commands.iter().enumerate() {
        out.extend_from_slice(if nth == 0 { b"[[" } else { b"],[" });
        for (nth, word) in argv.iter().enumerate() {
            out.extend_from_slice(if nth == 0 { b"\"" } else { b",\"" });
            for byte in &**word {
                match byte {
                    b'"' | b'\\' => out.extend_from_slice(&[b'\\', *byte]),
                    0..=0x1f => {
                        let digit = |digit: u8| if digit < 10 { b'0' + digit } else { b'a' - 10 + digit };
                        out.extend_from_slice(b"\\u00");
                        out.extend_from_slice(&[digit(byte >> 4), digit(byte & 15)]);
                    }
                    _ => out.push(*byte),
                }
            }
            out.push(b'"');
        }
    }
    out.extend_from_slice(b"]]");
}

/// What is within an array that frames the answers of a pipeline. A script answers with an array or an error, so that
/// an answer of one word is not taken for a frame.
fn without_frame(answer: &[u8], commands: usize) -> Option<&[u8]> {
    let framed = answer.strip_prefix(format!("*{commands}\r\n").as_bytes())?;
    let mut rest = framed;
    for _ in 0..commands {
        let (value, after) = decode(rest).ok()?;
        if !matches!(value, Value::Array(_) | Value::Error(_)) {
            return None;
        }
        rest = after;
    }
    rest.is_empty().then_some(framed)
}

/// Results and errors as RESP values.
fn from_json(answer: &[u8]) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    match Json::parse(answer).ok()? {
        Json::List(items) => items.iter().try_for_each(|item| push_result(&mut out, item))?,
        one @ (Json::Null
        | Json::Bool(_)
        | Json::Integer(_)
        | Json::Float(_)
        | Json::Text(_)
        | Json::Object(_)) => push_result(&mut out, &one)?,
    }
    Some(out)
}

fn push_result(out: &mut Vec<u8>, item: &Json) -> Option<()> {
    let Json::Object(members) = item else { return None };
    let [(name, value)] = members.as_slice() else { return None };
    match (name.as_str(), value) {
        ("error", Json::Text(text)) => {
            out.push(b'-');
            // An error is one line.
            out.extend(text.bytes().filter(|byte| !matches!(byte, b'\r' | b'\n')));
            out.extend_from_slice(b"\r\n");
            Some(())
        }
        ("result", Json::List(values)) => {
            push_length(out, b'*', values.len());
            values.iter().try_for_each(|value| push_value(out, value))
        }
        ("result", value) => push_value(out, value),
        _ => None,
    }
}

fn push_value(out: &mut Vec<u8>, value: &Json) -> Option<()> {
    match value {
        Json::Text(text) => push_bulk(out, &from_base64(text.as_bytes())?),
        Json::Integer(number) => out.extend_from_slice(format!(":{number}\r\n").as_bytes()),
        Json::Null => out.extend_from_slice(b"$-1\r\n"),
        Json::Bool(_) | Json::Float(_) | Json::List(_) | Json::Object(_) => return None,
    }
    Some(())
}

/// RFC 4648 section 4, with its padding.
fn from_base64(text: &[u8]) -> Option<Vec<u8>> {
    let (groups, []) = text.as_chunks::<4>() else { return None };
    let mut out = Vec::with_capacity(text.len());
    for (nth, group) in groups.iter().enumerate() {
        let padding = group.iter().rev().take_while(|byte| **byte == b'=').count();
        if padding > 2 || padding > 0 && nth.saturating_add(1) != groups.len() {
            return None;
        }
        let mut bits = 0_u32;
        for byte in group.iter().take(4 - padding) {
            bits = bits << 6 | u32::from(sextet(*byte)?);
        }
        let [_, bytes @ ..] = (bits << (6 * padding)).to_be_bytes();
        out.extend_from_slice(bytes.get(..3 - padding)?);
    }
    Some(out)
}

const fn sextet(byte: u8) -> Option<u8> {
    Some(match byte {
        b'A'..=b'Z' => byte - b'A',
        b'a'..=b'z' => byte - b'a' + 26,
        b'0'..=b'9' => byte - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn argv<'a>(words: &[&'a [u8]]) -> Vec<Cow<'a, [u8]>> {
        words.iter().map(|word| Cow::Borrowed(*word)).collect()
    }

    fn opened(transport: Transport, answer: &[u8], commands: usize) -> Option<usize> {
        envelope::open(&transport.as_of_link(answer, commands), commands).map(|values| values.len())
    }

    #[test]
    fn the_link_gets_commands_and_a_quit_and_its_answer_is_left_alone() {
        let encoded = Transport::Link.encode(&[argv(&[b"GET", b"a"])]);
        assert_eq!((encoded.path.as_str(), encoded.headers), ("/", &[][..]));
        assert_eq!(encoded.body, b"*2\r\n$3\r\nGET\r\n$1\r\na\r\n*1\r\n$4\r\nQUIT\r\n");
        assert_eq!(&*Transport::Link.as_of_link(b":1\r\n", 1), b":1\r\n");
        assert_eq!(opened(Transport::Link, b":1\r\n", 1), None);
    }

    /// H01, H02: no byte of a word can end it, begin a query or choose a format.
    #[test]
    fn webdis_gets_one_command_with_every_byte_that_means_something_encoded() {
        let encoded = Transport::Webdis.encode(&[argv(&[b"EVALSHA", b"a/b.c?d#e%f+g:h i\r\n\x00\x80", b""])]);
        assert_eq!(
            String::from_utf8(encoded.body).unwrap(),
            "EVALSHA/a%2Fb%2Ec%3Fd%23e%25f%2Bg%3Ah%20i%0D%0A%00%80/.raw"
        );
        assert_eq!(opened(Transport::Webdis, b"*2\r\n$7\r\nclaimed\r\n$1\r\n1\r\n", 1), Some(1));
        assert_eq!(opened(Transport::Webdis, b"-NOSCRIPT\r\n", 1), Some(1));
        for broken in [&b""[..], b"*2\r\n$7\r\nclaimed\r\n", b":1\r\n:1\r\n", b"{\"EVALSHA\":[]}"] {
            assert_eq!(opened(Transport::Webdis, broken, 1), None, "{}", broken.escape_ascii());
        }
    }

    #[test]
    fn upstash_gets_text_as_a_pipeline_and_bytes_as_a_body() {
        let commands = [argv(&[b"EVAL", b"return \"\\\n\x01\""]), argv(&[b"GET", "\u{e9}".as_bytes()])];
        let encoded = Transport::UpstashResp2.encode(&commands);
        assert_eq!(encoded.path, "/pipeline");
        assert_eq!(
            String::from_utf8(encoded.body).unwrap(),
            "[[\"EVAL\",\"return \\\"\\\\\\u000a\\u0001\\\"\"],[\"GET\",\"\u{e9}\"]]"
        );
        assert!(Transport::UpstashResp2.sends_alone(b"\xff") && !Transport::Link.sends_alone(b"\xff"));
        let encoded = Transport::UpstashBase64.encode(&[argv(&[b"SET", b"a:b", b"\xff\x00"])]);
        assert_eq!((encoded.path.as_str(), &*encoded.body), ("/SET/a%3Ab", &b"\xff\x00"[..]));
        assert_eq!(encoded.headers, [("upstash-encoding", "base64")]);
    }

    #[test]
    fn resp2_is_read_with_and_without_a_frame() {
        let one = b"*1\r\n$7\r\napplied\r\n";
        let claimed = b"*2\r\n$7\r\nclaimed\r\n:1\r\n";
        for (answer, commands, read) in [
            (one.to_vec(), 1, Some(1)),
            ([&b"*1\r\n"[..], one].concat(), 1, Some(1)),
            ([&claimed[..], claimed].concat(), 2, Some(2)),
            ([&b"*2\r\n"[..], claimed, claimed].concat(), 2, Some(2)),
            ([&b"*2\r\n"[..], claimed, b"-ERR\r\n"].concat(), 2, Some(2)),
            ([&b"*2\r\n"[..], claimed].concat(), 2, None),
            (claimed.to_vec(), 2, None),
            (b"".to_vec(), 1, None),
        ] {
            let found = opened(Transport::UpstashResp2, &answer, commands);
            assert_eq!(found, read, "{}", answer.escape_ascii());
        }
        let framed = [&b"*1\r\n"[..], one].concat();
        let values = Transport::UpstashResp2.as_of_link(&framed, 1);
        assert_eq!(&*values, [&one[..], b"+OK\r\n"].concat());
    }

    #[test]
    fn json_results_become_values() {
        let answer = b"[{\"result\":[\"Y2xhaW1lZA==\",1,null]},{\"error\":\"NOSCRIPT no\\r\\n+OK\"},{\"result\":\"/+8=\"}]";
        assert_eq!(
            Transport::UpstashBase64.as_of_link(answer, 3).escape_ascii().to_string(),
            "*3\\r\\n$7\\r\\nclaimed\\r\\n:1\\r\\n$-1\\r\\n-NOSCRIPT no+OK\\r\\n$2\\r\\n\\xff\\xef\\r\\n+OK\\r\\n"
        );
        assert_eq!(opened(Transport::UpstashBase64, b"{\"error\":\"ERR\"}", 1), Some(1));
        for broken in [
            &b""[..],
            b"[]",
            b"[{}]",
            b"[1]",
            b"[{\"result\":\"a\"}]",
            b"[{\"result\":[[1]]}]",
            b"[{\"result\":1,\"error\":\"x\"}]",
            b"[{\"result\":1},{\"result\":1}]",
            b"<html>",
        ] {
            assert_eq!(opened(Transport::UpstashBase64, broken, 1), None, "{}", broken.escape_ascii());
        }
    }

    #[test]
    fn base64_is_that_of_its_rfc() {
        for (text, bytes) in [
            ("", &b""[..]),
            ("Zg==", b"f"),
            ("Zm8=", b"fo"),
            ("Zm9v", b"foo"),
            ("Zm9vYg==", b"foob"),
            ("AP/+", b"\x00\xff\xfe"),
        ] {
            assert_eq!(from_base64(text.as_bytes()).as_deref(), Some(bytes), "{text}");
        }
        for text in ["Z", "Zg", "Zg=", "Z===", "====", "Zg==Zg==", "Zm9_", "Zm 9"] {
            assert_eq!(from_base64(text.as_bytes()), None, "{text}");
        }
    }
}
