//! The body of a callout: pipelined commands and a QUIT; and its answer, which has to prove itself.
//!
//! A connection that ends early, or another one's answer, looks like a shorter or a longer reply. So an answer counts
//! only as a whole: exactly one value for each command, the QUIT's `+OK` last, nothing after.

use super::resp::{Value, decode, encode_command};

/// Ends the body. `redis_proxy` answers it in its turn and closes, and that ends the callout.
pub fn seal(body: &mut Vec<u8>) {
    encode_command(body, &["QUIT"]);
}

/// The values that answer so many commands; `None` if the answer is anything else.
#[must_use]
pub fn open(answer: &[u8], commands: usize) -> Option<Vec<Value<'_>>> {
    let mut values = Vec::with_capacity(commands);
    let mut rest = answer;
    for _ in 0..commands {
        let (value, after) = decode(rest).ok()?;
        values.push(value);
        rest = after;
    }
    (rest == b"+OK\r\n").then_some(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_whole_answer_counts() {
        let whole = b":1\r\n$2\r\nab\r\n+OK\r\n";
        assert_eq!(open(whole, 2), Some(vec![Value::Integer(1), Value::Bulk(b"ab")]));
        for cut in 0..whole.len() {
            assert_eq!(open(&whole[..cut], 2), None, "cut at {cut}");
        }
        for other in [
            &b":1\r\n:2\r\n:3\r\n+OK\r\n"[..],
            b":1\r\n+OK\r\n",
            b":1\r\n:2\r\n+OK\r\n+OK\r\n",
            b":1\r\n:2\r\n-ERR\r\n",
        ] {
            assert_eq!(open(other, 2), None, "{}", other.escape_ascii());
        }
    }
}
