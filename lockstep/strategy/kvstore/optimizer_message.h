// strategy/kvstore/optimizer_message.h: what a server's optimizer is made from, as bytes of fixed size.
#pragma once

#include "lockstep/strategy.h"

namespace lockstep {

struct OptimizerMessage {
  OptimizerOptions optimizer;
  ClippingOptions clipping;
  double ema_decay = 0;
};

inline OptimizerMessage to_message(const StrategyOptions& options) {
  return {.optimizer = options.optimizer, .clipping = options.clipping, .ema_decay = options.ema_decay};
}
inline StrategyOptions from_message(const OptimizerMessage& message) {
  return {.optimizer = message.optimizer, .clipping = message.clipping, .ema_decay = message.ema_decay};
}

}  // namespace lockstep
