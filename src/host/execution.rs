//! Detached executions: requests that wait to be sent by the root, and those that are out.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::time::Duration;

use super::hostcalls::{self, Buffer, Map};
use super::stream::StreamState;
use crate::exchange::{ExecutionAnswer, NotDispatched, execution_lines};
use crate::headers::HeaderBlock;
use crate::reply::replay::are_remarks;

/// The detached executions of one worker.
#[derive(Default)]
pub struct Executions {
    cluster: String,
    queued: RefCell<VecDeque<Queued>>,
    running: RefCell<BTreeMap<u32, Rc<RefCell<StreamState>>>>,
}

/// A request that waits for the root.
struct Queued {
    stream: Rc<RefCell<StreamState>>,
    /// `None` when the host could not give it.
    request: Option<HeldRequest>,
    timeout: Duration,
}

/// A held request as the execution listener gets it.
pub struct HeldRequest {
    headers: HeaderBlock,
    attempt: Option<String>,
    protected: bool,
    body: Vec<u8>,
}

impl HeldRequest {
    /// Reads the request that the current stream holds. `None` when the host does not give all of it.
    pub fn read(attempt: u32, protected: bool, body_bytes: u64) -> Option<Self> {
        let headers = HeaderBlock::parse(hostcalls::header_pairs(Map::Request).ok()?).ok()?;
        let length = usize::try_from(body_bytes).ok()?;
        let body =
            if length == 0 { Vec::new() } else { hostcalls::buffer(Buffer::RequestBody, 0, length).ok()? };
        if body.len() != length {
            return None;
        }
        let attempt = (attempt > 1).then(|| attempt.to_string());
        Some(Self { headers, attempt, protected, body })
    }
}

impl Executions {
    /// Executions through this cluster; none yet.
    pub fn through(cluster: Option<&str>) -> Self {
        Self { cluster: cluster.unwrap_or_default().to_owned(), ..Self::default() }
    }

    /// Puts a request where the root finds it.
    pub fn submit(&self, stream: Rc<RefCell<StreamState>>, request: Option<HeldRequest>, timeout: Duration) {
        if let Ok(mut queued) = self.queued.try_borrow_mut() {
            queued.push_back(Queued { stream, request, timeout });
        }
    }

    /// Sends what waits. Only from the root's own callbacks: the answer comes to the context that runs. Gives back
    /// what could not be sent, and why.
    pub fn dispatch(&self) -> Vec<(Rc<RefCell<StreamState>>, NotDispatched)> {
        let mut failed = Vec::new();
        while let Some(Queued { stream, request, timeout }) =
            self.queued.try_borrow_mut().ok().and_then(|mut queued| queued.pop_front())
        {
            match request.ok_or(NotDispatched::Unreadable).and_then(|request| self.send(&request, timeout)) {
                Ok(token) => {
                    if let Ok(mut running) = self.running.try_borrow_mut() {
                        running.insert(token, stream);
                    }
                }
                Err(why) => failed.push((stream, why)),
            }
        }
        failed
    }

    fn send(&self, request: &HeldRequest, timeout: Duration) -> Result<u32, NotDispatched> {
        let HeldRequest { headers, attempt, protected, body } = request;
        let lines = execution_lines(headers, attempt.as_deref(), *protected, !body.is_empty())
            .ok_or(NotDispatched::Unreadable)?;
        hostcalls::http_call(&self.cluster, &lines, body, timeout).map_err(|status| {
            if status.0 == hostcalls::BAD_ARGUMENT {
                NotDispatched::UnknownCluster
            } else {
                NotDispatched::NobodyListens
            }
        })
    }

    /// Whose execution a callout was; it is over.
    pub fn take(&self, token: u32) -> Option<Rc<RefCell<StreamState>>> {
        self.running.try_borrow_mut().ok()?.remove(&token)
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        let none_queued = self.queued.try_borrow().is_ok_and(|queued| queued.is_empty());
        none_queued && self.running.try_borrow().is_ok_and(|running| running.is_empty())
    }

    /// Every one whose callout is out.
    pub fn running(&self) -> Vec<Rc<RefCell<StreamState>>> {
        self.running.try_borrow().map(|running| running.values().map(Rc::clone).collect()).unwrap_or_default()
    }

    /// The root goes: every execution, and how it ends.
    pub fn abandon(&self) -> Vec<(Rc<RefCell<StreamState>>, ExecutionAnswer<'static>)> {
        let queued = self.queued.try_borrow_mut().map(|mut queued| std::mem::take(&mut *queued));
        let running = self.running.try_borrow_mut().map(|mut running| std::mem::take(&mut *running));
        let never_left = || ExecutionAnswer::NotDispatched(NotDispatched::RootGone);
        let queued = queued.unwrap_or_default().into_iter().map(|queued| (queued.stream, never_left()));
        let running = running.unwrap_or_default().into_values();
        queued.chain(running.map(|stream| (stream, ExecutionAnswer::Unanswered))).collect()
    }
}

/// The head of a callout's answer; `None` when there is none, which is also said by a count of zero lines.
pub fn answer_head(lines: usize) -> Option<HeaderBlock> {
    // Without lines there is nothing that may be read.
    if lines == 0 {
        return None;
    }
    let headers = HeaderBlock::parse(hostcalls::header_pairs(Map::CalloutResponse).ok()?).ok()?;
    headers.first(":status").is_some().then_some(headers)
}

/// The whole answer. `has_room`: its body may be read.
pub fn answer(
    headers: Option<&HeaderBlock>,
    body_size: usize,
    trailers: usize,
    has_room: bool,
) -> ExecutionAnswer<'_> {
    let Some(headers) = headers else { return ExecutionAnswer::Unanswered };
    let has_trailers = trailers > 0 && {
        let lines = hostcalls::header_pairs(Map::CalloutResponseTrailers).ok();
        !lines.and_then(|lines| HeaderBlock::parse(lines).ok()).is_some_and(|lines| are_remarks(&lines))
    };
    let body = if body_size == 0 {
        Some(Vec::new())
    } else if has_room {
        let body = hostcalls::buffer(Buffer::CalloutResponseBody, 0, body_size).ok();
        body.filter(|body| body.len() == body_size)
    } else {
        None
    };
    ExecutionAnswer::Answered { headers, body, has_trailers }
}
