-- ready: how many due items wait, by the first character of their lane keys.
-- args     {now ms}
-- answers  {{character, how many}, ...}; nil: call again
local now = args[1]
local more = promote(now)
settle(now)
wake()
if more then return false end
local flat, found = call('HGETALL', at .. 'counts'), {}
for n = 1, #flat, 2 do found[#found + 1] = {flat[n], tonumber(flat[n + 1])} end
return pack(found)
