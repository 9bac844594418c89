use std::time::{Duration, Instant};

use http::Response;

const AGAIN: [&str; 5] =
    ["in-flight", "store-unavailable", "store-full", "execution-unavailable", "body-timeout"];
const REJECTED: [&str; 6] =
    ["missing-key", "invalid-key", "invalid-scope", "payload-too-large", "mismatch", "misconfigured"];

#[derive(Debug, PartialEq, Eq)]
pub enum Failure {
    /// It may have taken effect. Keep the key, find out, and only then decide.
    Unsettled(String),
    /// Nothing has run, and sending it again changes nothing.
    Rejected(String),
}

/// The service's answer. `post` sends the same bytes under the same key each time it is called.
pub fn send<Body, Error>(
    patience: Duration,
    resent: bool,
    mut post: impl FnMut() -> Result<Response<Body>, Error>,
) -> Result<Response<Body>, Failure> {
    let begin = Instant::now();
    for attempt in i32::from(resent).. {
        let mut why = "no answer".to_owned();
        let mut least = 0;
        // An error means that nobody knows what became of it; the same key finds out.
        if let Ok(answer) = post() {
            let status = answer.status().as_u16();
            let field = |name| answer.headers().get(name).and_then(|value| value.to_str().ok());
            let refusal = field("x-idempotency-refusal");
            why = refusal.map_or_else(|| format!("status {status}"), str::to_owned);
            match refusal {
                Some(kind) if REJECTED.contains(&kind) && attempt == 0 => return Err(Failure::Rejected(why)),
                Some(kind) if !AGAIN.contains(&kind) => return Err(Failure::Unsettled(why)),
                // Says nothing about the earlier tries.
                None if [401, 403, 407].contains(&status) && attempt > 0 => {
                    return Err(Failure::Unsettled(why));
                }
                None if status < 500 && ![408, 425, 429].contains(&status) => return Ok(answer),
                Some(_) | None => {}
            }
            least = field("retry-after").and_then(|seconds| seconds.parse::<u16>().ok()).unwrap_or(0);
        }
        let bound = f64::min(20.0, 0.5 * 2_f64.powi(attempt.min(10)));
        let pause = Duration::from_secs(least.into()) + Duration::from_secs_f64(bound * fastrand::f64());
        if begin.elapsed() + pause > patience {
            return Err(Failure::Unsettled(why));
        }
        std::thread::sleep(pause);
    }
    Err(Failure::Unsettled("too many tries".to_owned()))
}
