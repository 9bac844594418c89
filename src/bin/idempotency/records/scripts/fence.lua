-- What the changes of an operator begin with, behind record.lua: state, owner and attempt that were shown, and
-- "lease_over" or "any_lease".
if not record then
    return { 'gone' }
end
if record.state ~= ARGV[1] or record.owner ~= ARGV[2] or record.attempt ~= tonumber(ARGV[3]) then
    return { 'changed' }
end
if record.state == 'in_flight' and now < record.lease_until and ARGV[4] ~= 'any_lease' then
    return { 'alive' }
end
