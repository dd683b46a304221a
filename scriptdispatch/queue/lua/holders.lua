-- holders: locks in force of these devices.
-- args     {now ms, {device, ...}}
-- answers  one for each: {value, task id or '', since ms or -1}, or false
local found = {}
for n, device in ipairs(args[2]) do
  local value, task, since = lock_of(device, args[1])
  found[n] = value and {value, task or '', since or -1} or false
end
return pack(found)
