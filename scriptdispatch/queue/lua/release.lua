-- release (K3), force (D3): deletes the lock if it has this value, and looks at the lane, in one step.
-- args     {now ms, {{device, value, fence of its stored row or 0}, ...}}
-- answers  true or false for each: was it deleted
local now, answers = args[1], {}
for n, row in ipairs(args[2]) do
  local device = row[1]
  local text = call('HGET', LOCKS, device)
  local value = text and (string.match(text, '^until=%d+ since=%d+ task=%S* value=(.*)$') or text)
  answers[n] = value == row[2]
  if answers[n] then
    call('HDEL', LOCKS, device)
    call('ZREM', LOCK_NAMES, device)
    call('ZREM', LOCK_ENDS, device)
    -- Only of the holder, which has the device's highest: the release of an old execution may be repeated at any time.
    if row[3] > 0 then call('HSET', FENCES, device, string.format('%.0f %.0f', row[3], now)) end
  end
  look_at(device)
end
settle(now)
wake()
return pack(answers)
