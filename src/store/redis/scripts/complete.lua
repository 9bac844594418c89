-- complete: owner, fingerprint, fingerprint version, attempt, the record's life, the response.
local owner, life, response = ARGV[1], ARGV[5], ARGV[6]

if not record then
    -- Nobody took over: dropping the only trace of an execution would run it again.
    redis.call('HSET', key, 'v', FORMAT, 'state', 'completed', 'owner', owner, 'attempt', ARGV[4],
        'created', decimal(now), 'fingerprint', ARGV[2], 'fingerprint_version', ARGV[3], 'response', response)
elseif record.owner ~= owner then
    return { 'stale' }
elseif record.state == 'in_flight' then
    redis.call('HSET', key, 'state', 'completed', 'response', response)
    redis.call('HDEL', key, 'lease_until')
else
    return { record.state == 'completed' and 'applied' or 'stale' }
end
redis.call('PEXPIRE', key, life)
return { 'applied' }
