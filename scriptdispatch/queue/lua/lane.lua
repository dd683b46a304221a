-- lane: the task ids that wait in the lane of a device, first one first.
-- args     {now ms, device, limit}
-- answers  {task id, ...}; nil: call again
local now = args[1]
local more = promote(now)
settle(now)
wake()
if more then return false end
local found = {}
for _, member in ipairs(call('ZRANGE', at .. 'lane:' .. args[2], 0, args[3] - 1)) do found[#found + 1] = id_of(member) end
return pack(found)
