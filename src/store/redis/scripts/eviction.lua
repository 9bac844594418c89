-- What Redis does when its memory is full. KEYS[1] only says which shard is asked.
local info = redis.pcall('INFO', 'memory')
if type(info) ~= 'string' then
  -- An ACL without INFO.
  return {'unknown'}
end
return {'memory', string.match(info, '\nmaxmemory:(%d+)'), string.match(info, '\nmaxmemory_policy:([%a-]+)')}
