-- all: locks in force, by device.
-- args     {now ms, after which device or '', limit}
-- answers  {{device, value, task id or '', since ms or -1}, ...}
-- A person, or another program, sets and deletes locks in the hash alone: the list of names is made anew when it differs.
local now, after, limit = args[1], args[2], args[3]
if call('HLEN', LOCKS) ~= call('ZCARD', LOCK_NAMES) then
  call('DEL', LOCK_NAMES)
  for _, device in ipairs(call('HKEYS', LOCKS)) do call('ZADD', LOCK_NAMES, 0, device) end
end
local found = {}
while #found < limit do
  local names = call('ZRANGEBYLEX', LOCK_NAMES, '(' .. after, '+', 'LIMIT', 0, limit)
  for _, device in ipairs(names) do
    local value, task, since = lock_of(device, now)
    if value and #found < limit then found[#found + 1] = {device, value, task or '', since or -1} end
  end
  if #names < limit then break end
  after = names[#names]
end
return pack(found)
