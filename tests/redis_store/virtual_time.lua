-- Goes before a script under test, which stays as it is: for it, `redis` is this table.
--
-- TIME is the key "clock", in milliseconds. PEXPIRE keeps a deadline beside the key instead of its expiry, PTTL reads
-- it, and a key whose deadline is past is gone before the script looks. Everything else is Redis.
local real = redis
local clock = tonumber(real.call('GET', 'clock'))

local function substitute(call, command, key, ...)
    if command == 'TIME' then
        return { string.format('%.0f', math.floor(clock / 1000)), string.format('%.0f', clock % 1000 * 1000 + 999) }
    elseif command == 'PEXPIRE' then
        return real.call('ZADD', 'deadlines', string.format('%.0f', clock + select(1, ...)), key)
    elseif command == 'PTTL' then
        return real.call('ZSCORE', 'deadlines', key) - clock
    end
    if key == nil then
        return call(command)
    end
    return call(command, key, ...)
end

local redis = {
    call = function(...) return substitute(real.call, ...) end,
    pcall = function(...) return substitute(real.pcall, ...) end,
}

local deadline = real.call('ZSCORE', 'deadlines', KEYS[1])
if deadline and tonumber(deadline) <= clock then
    real.call('DEL', KEYS[1])
end
