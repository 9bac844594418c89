-- release: owner.
if not record then
    return { 'applied' }
end
if record.owner ~= ARGV[1] or record.state ~= 'in_flight' then
    return { 'stale' }
end
redis.call('DEL', key)
return { 'applied' }
