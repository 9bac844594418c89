-- resolve: a new owner, the record's life, the response, what the record was.
--
-- The owner is a new one: what the old one still has to write is stale from here on, in its Envoy's near cache too.
redis.call('HSET', key, 'state', 'completed', 'owner', ARGV[5], 'response', ARGV[7],
    'resolved_at', decimal(now), 'resolved_from', ARGV[8])
redis.call('HDEL', key, 'lease_until', 'reason')
redis.call('PEXPIRE', key, ARGV[6])
return { 'applied' }
