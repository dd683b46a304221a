-- acquire (W2): the lock if it is free, expired or already this execution's: repeated, it gives the same answer.
-- args     {now ms, {{device, execution id, task id, ms until which it holds}, ...}}
-- answers  one for each claim: 1 + the device's last fence, or 1 if it is not remembered = granted, 0 = rebuilding (B1), or
--          {value, task id or '', since ms or -1} of who holds it
local now, answers = args[1], {}
if call('EXISTS', at .. 'epoch') == 0 then
  for n = 1, #args[2] do answers[n] = 0 end
  return pack(answers)
end
for n, claim in ipairs(args[2]) do
  local device = claim[1]
  local value, task, since = lock_of(device, now)
  if value and value ~= claim[2] then
    answers[n] = {value, task or '', since or -1}
  else
    set_lock(device, claim, since or now)
    -- Closed already while the task is leased. Not so if the lease was lost meanwhile: the lock closes the lane then.
    look_at(device)
    answers[n] = 1 + last_fence(device, now)
  end
end
settle(now)
wake()
return pack(answers)
