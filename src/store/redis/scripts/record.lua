-- What the five scripts begin with: the record under KEYS[1], and the time.
--
-- One key each, so they run in a cluster; Redis 6.0 or later, Valkey. The rules are those of src/record/mod.rs.

-- The format that this version writes, and the only one it reads.
local FORMAT = '1'

local key = KEYS[1]

-- Milliseconds on Redis's own clock.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local found = redis.pcall('HMGET', key, 'v', 'state', 'owner', 'attempt', 'lease_until', 'created', 'reason',
    'fingerprint', 'fingerprint_version')
if found.err then
    if string.find(found.err, 'WRONGTYPE', 1, true) then
        return { 'unreadable' }
    end
    return found
end

local record = nil
if found[1] then
    record = {
        state = found[2],
        owner = found[3],
        attempt = tonumber(found[4]),
        lease_until = tonumber(found[5]),
        created = tonumber(found[6]),
        reason = found[7],
        fingerprint = found[8],
        fingerprint_version = found[9],
    }
    local known = record.state == 'in_flight' and record.lease_until
        or record.state == 'completed'
        or record.state == 'failed' and record.reason
    if found[1] ~= FORMAT or not (known and record.owner and record.attempt and record.created
        and record.fingerprint and record.fingerprint_version) then
        return { 'unreadable' }
    end
elseif redis.call('EXISTS', key) == 1 then
    -- A hash of somebody else's. It is never the same as nothing.
    return { 'unreadable' }
end

-- A moment or a number as Redis keeps it.
local function decimal(number)
    return string.format('%.0f', number)
end
