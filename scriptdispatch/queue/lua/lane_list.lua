-- lanes: devices whose lane has waiting tasks, by name.
-- args     {now ms, after which device or '', limit}
-- answers  {{device, how many wait}, ...}; nil: call again
local now = args[1]
local more = promote(now)
settle(now)
wake()
if more then return false end
local found = {}
for _, device in ipairs(call('ZRANGEBYLEX', LANES, '(' .. args[2], '+', 'LIMIT', 0, args[3])) do
  found[#found + 1] = {device, call('ZCARD', at .. 'lane:' .. device)}
end
return pack(found)
