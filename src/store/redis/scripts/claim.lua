-- claim: owner, fingerprint, fingerprint version, lock_ttl, the record's life, "takeover" or "retain".
--
-- The life is no shorter than lock_ttl: a record that ended before its lease could not tell the attempt.
local owner, fingerprint, fingerprint_version = ARGV[1], ARGV[2], ARGV[3]
local lock_ttl, life, on_abandoned = tonumber(ARGV[4]), ARGV[5], ARGV[6]

local attempt = 1
if record then
    -- Fingerprints of different versions can't be compared.
    if record.fingerprint_version ~= fingerprint_version then
        return { 'unreadable' }
    end
    if record.state == 'completed' then
        local response = redis.call('HGET', key, 'response')
        if not response then
            return { 'unreadable' }
        end
        return { 'completed', record.fingerprint, redis.call('PTTL', key), response }
    end
    if record.state == 'failed' then
        return { 'failed', record.fingerprint, record.reason }
    end
    -- This claim itself: its reply was lost.
    if record.owner == owner then
        return { 'claimed', record.attempt }
    end
    if now < record.lease_until then
        -- A clock that was set back makes no negative time.
        return { 'in_flight', record.fingerprint, math.max(0, now - record.created), record.lease_until - now }
    end
    -- A takeover runs the request again, so only the same request may do it.
    if on_abandoned ~= 'takeover' or record.fingerprint ~= fingerprint then
        return { 'abandoned', record.fingerprint }
    end
    attempt = math.min(record.attempt + 1, 4294967295)
end

redis.call('HSET', key, 'v', FORMAT, 'state', 'in_flight', 'owner', owner, 'attempt', decimal(attempt),
    'lease_until', decimal(now + lock_ttl), 'created', decimal(now), 'fingerprint', fingerprint,
    'fingerprint_version', fingerprint_version)
redis.call('PEXPIRE', key, life)
return { 'claimed', attempt }
