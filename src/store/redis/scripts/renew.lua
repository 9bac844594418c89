-- renew: owner, fingerprint, fingerprint version, attempt, lock_ttl, the record's life.
local owner, lease_until, life = ARGV[1], decimal(now + tonumber(ARGV[5])), ARGV[6]

if not record then
    redis.call('HSET', key, 'v', FORMAT, 'state', 'in_flight', 'owner', owner, 'attempt', ARGV[4],
        'lease_until', lease_until, 'created', decimal(now), 'fingerprint', ARGV[2], 'fingerprint_version', ARGV[3])
elseif record.owner == owner and record.state == 'in_flight' then
    redis.call('HSET', key, 'lease_until', lease_until)
else
    return { 'stale' }
end
redis.call('PEXPIRE', key, life)
return { 'applied' }
