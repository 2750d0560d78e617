-- Argo CD health of rljob.io/RLJob: put it under `resource.customizations.health.rljob.io_RLJob` in the ConfigMap
-- argocd-cm (docs/gitops.md). Only conditions are read: the phase is for display.
local health = { status = "Progressing", message = "Waiting for the operator" }
if obj.metadata.deletionTimestamp ~= nil then
  health.message = "Being deleted"
  return health
end
if obj.status == nil or obj.status.conditions == nil then
  return health
end
-- A verdict about an older spec says nothing about this one.
if obj.status.observedGeneration ~= obj.metadata.generation then
  health.message = "Waiting for the operator to see generation " .. tostring(obj.metadata.generation)
  return health
end
local conditions = {}
for _, condition in ipairs(obj.status.conditions) do
  conditions[condition.type] = condition
end
local function is_true(name)
  return conditions[name] ~= nil and conditions[name].status == "True"
end
local function message_of(name)
  if conditions[name] == nil then
    return nil
  end
  return conditions[name].message
end
if is_true("Stalled") or is_true("Failed") then
  local name = is_true("Failed") and "Failed" or "Stalled"
  health.status = "Degraded"
  health.message = tostring(conditions[name].reason) .. ": " .. tostring(message_of(name))
elseif is_true("Succeeded") then
  health.status = "Healthy"
  health.message = message_of("Succeeded")
elseif is_true("Suspended") then
  health.status = "Suspended"
  health.message = message_of("Suspended")
elseif is_true("Reconciling") then
  health.message = message_of("Reconciling")
elseif is_true("Ready") then
  health.status = "Healthy"
  health.message = message_of("Ready")
else
  health.message = message_of("Ready") or health.message
end
return health
