-- restore (R2): sets the lock where it is absent, whether the epoch is there or not.
-- args     {now ms, {{device, execution id, task id, ms until which it holds}, ...}}
-- answers  true or false for each: was it set
local now, answers = args[1], {}
for n, claim in ipairs(args[2]) do
  local device = claim[1]
  answers[n] = lock_of(device, now) == nil
  if answers[n] then set_lock(device, claim, now) end
  look_at(device)
end
settle(now)
wake()
return pack(answers)
