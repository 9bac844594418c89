//! Completing: the response goes into the record's slot, then the record says so.

use std::time::Duration;

use super::body::{self, BodyDraft, BodyMark};
use super::cas::Cas;
use super::entry::{Entry, Kept};
use super::ledger::Settlement;
use super::table::{Loaded, Place, Seat, clear_if, find, load, swap};
use super::{SharedDataStore, TRIES, re_created};
use crate::clock::Timestamp;
use crate::record::codec::{ResponseEncoder, StoredResponse};
use crate::record::{Record, RecordState, WriteDecision, WriteKind, decide_write};
use crate::store::{Hold, StoreError, WriteReply};

/// Longest encoding that is kept of a response whose body had no room.
const LONGEST_TOMBSTONE: usize = 2_048;

/// What is to be kept.
struct Completion<'a> {
    place: Place,
    hold: &'a Hold,
    response: &'a [u8],
    decoded: StoredResponse<'a>,
    record_ttl: Duration,
    now: Timestamp,
}

/// A response on its way into a slot.
#[derive(Debug, Default)]
struct Saving {
    /// What goes into the slot; `None` keeps the status alone.
    draft: Option<BodyDraft>,
    /// What the ledger holds for it.
    reserved: u32,
    /// What stands in a slot, not yet published.
    written: Option<(u8, BodyMark)>,
    /// There was no room for the response as it is.
    degraded: bool,
}

impl<C: Cas> SharedDataStore<C> {
    pub(super) fn complete(
        &mut self,
        hold: &Hold,
        response: &[u8],
        record_ttl: Duration,
        now: Timestamp,
    ) -> Result<WriteReply, StoreError> {
        let decoded = StoredResponse::decode(response).map_err(|_| StoreError::Unreadable)?;
        let place = Place::of(&hold.key, &self.geometry);
        let completion = Completion { place, hold, response, decoded, record_ttl, now };
        let mut saving = None;
        let outcome = self.try_complete(&completion, &mut saving);
        // Whatever is still here was not published.
        if let Some(saving) = saving {
            self.withdraw(&place, &saving, now);
        }
        outcome
    }

    /// Leaves in `saving` what was begun and not published.
    fn try_complete(
        &mut self,
        completion: &Completion<'_>,
        saving: &mut Option<Saving>,
    ) -> Result<WriteReply, StoreError> {
        let Completion { place, hold, now, .. } = completion;
        for _ in 0..TRIES {
            let mut loaded = self.load_bucket(place.bucket)?;
            let found = find(&loaded.bucket, place, *now)?;
            let record = found.as_ref().map(|entry| &entry.record);
            match decide_write(record, &hold.owner, WriteKind::Complete, *now) {
                WriteDecision::Apply => {}
                WriteDecision::AlreadyApplied => {
                    // Bytes that the record does refer to stay where they are.
                    if let Some(saving) = saving {
                        let published = found.as_ref().and_then(Entry::body_mark);
                        saving.written.take_if(|(_, mark)| Some(*mark) == published);
                    }
                    return Ok(WriteReply::Applied);
                }
                WriteDecision::Stale => return Ok(WriteReply::Stale),
            }
            let begun = match saving {
                Some(begun) => begun,
                None => saving.insert(self.prepare(completion)),
            };
            self.drop_expired(place.bucket, &mut loaded, *now);
            let seat = self.seat(place, &mut loaded.bucket, &hold.owner)?;
            let Some(kept) = self.keep(completion, begun, &mut loaded, &seat)? else { continue };
            let record = completed(found.map(|entry| entry.record), completion, kept);
            if self.publish(place, loaded, &seat, record, begun.reserved, *now)? {
                let degraded = begun.degraded;
                *saving = None;
                if !degraded {
                    return Ok(WriteReply::Applied);
                }
                self.events.tombstones = self.events.tombstones.saturating_add(1);
                return Ok(WriteReply::AppliedAsTombstone);
            }
        }
        Err(StoreError::Unavailable)
    }

    /// Writes the slot; `None` if another's write came first, there or in the bucket.
    fn keep(
        &mut self,
        completion: &Completion<'_>,
        saving: &mut Saving,
        loaded: &mut Loaded,
        seat: &Seat,
    ) -> Result<Option<Kept>, StoreError> {
        let bucket = completion.place.bucket;
        let status = completion.decoded.status;
        let generation = loaded.bucket.next_version();
        let Some(draft) = &mut saving.draft else {
            // An earlier attempt may have left bytes there.
            loaded.leftovers.push(seat.slot);
            return Ok(Some(Kept::Status(status)));
        };
        if let Some((other, mark)) = saving.written.take_if(|(slot, _)| *slot != seat.slot) {
            clear_if(&self.cas, self.names.slot(bucket, other), |found| *found == mark);
        }
        let seen = load(&self.cas, self.names.slot(bucket, seat.slot))?.seen();
        // Only now is it known that the bucket still says so: see the module's protocol.
        if load(&self.cas, self.names.bucket(bucket))?.seen() != loaded.seen {
            self.events.contentions = self.events.contentions.saturating_add(1);
            return Ok(None);
        }
        let (value, mark) = draft.stamp(generation);
        if !swap(&self.cas, self.names.slot(bucket, seat.slot), seen, value, &mut self.events)? {
            return Ok(None);
        }
        saving.written = Some((seat.slot, mark));
        let BodyMark { length, checksum, .. } = mark;
        Ok(Some(Kept::Body { status, generation, length, checksum }))
    }

    /// Finds room for the response, or for as much of it as there is room for.
    fn prepare(&mut self, completion: &Completion<'_>) -> Saving {
        let StoredResponse { status, headers, origin, body } = &completion.decoded;
        if body.is_none() && headers.is_empty() && origin.is_none() {
            return Saving::default();
        }
        let response = completion.response;
        if let Some(saving) = self.draft(completion, response, true) {
            return saving;
        }
        let pointers: Vec<(&[u8], &[u8])> = headers
            .iter()
            .copied()
            .filter(|(name, _)| name.eq_ignore_ascii_case(b"location") || name.eq_ignore_ascii_case(b"etag"))
            .collect();
        let tombstone =
            if pointers.is_empty() { None } else { ResponseEncoder::tombstone(*status, pointers) };
        let tombstone =
            tombstone.filter(|bytes| bytes.len() <= LONGEST_TOMBSTONE && bytes.len() < response.len());
        let saving = tombstone.and_then(|bytes| self.draft(completion, &bytes, false)).unwrap_or_default();
        Saving { degraded: true, ..saving }
    }

    /// A draft of the bytes, if there is room; with `make_room`, what may go for it does.
    fn draft(&mut self, completion: &Completion<'_>, bytes: &[u8], make_room: bool) -> Option<Saving> {
        let Completion { place, hold, now, .. } = completion;
        let reserved = u32::try_from(bytes.len()).ok()?.checked_add(u32::try_from(body::MARK).ok()?)?;
        if !self.reserve(place.bucket, reserved, *now, make_room) {
            return None;
        }
        let draft = BodyDraft::of(place.tag, hold.owner, bytes);
        Some(Saving { draft, reserved, written: None, degraded: false })
    }

    fn withdraw(&mut self, place: &Place, saving: &Saving, now: Timestamp) {
        if let Some((slot, mark)) = saving.written {
            clear_if(&self.cas, self.names.slot(place.bucket, slot), |found| *found == mark);
        }
        if saving.reserved > 0 {
            let given_back = Settlement { used: None, unreserved: saving.reserved, leaked: 0 };
            self.settle(place.bucket, given_back, now);
        }
    }
}

fn completed(found: Option<Record<Kept>>, completion: &Completion<'_>, kept: Kept) -> Record<Kept> {
    let Completion { hold, record_ttl, now, .. } = completion;
    let record = found
        .filter(|record| *now < record.expires)
        .unwrap_or_else(|| re_created(hold, Duration::ZERO, *record_ttl, *now));
    Record { state: RecordState::Completed { response: kept }, expires: now.after(*record_ttl), ..record }
}
