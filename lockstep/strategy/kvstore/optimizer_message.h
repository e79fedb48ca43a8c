// strategy/kvstore/optimizer_message.h: an optimizer's options as bytes of fixed size, for the way to the servers.
#pragma once

#include <array>

#include "lockstep/strategy.h"

namespace lockstep {

struct OptimizerMessage {
  std::array<char, 8> name{};
  SGDOptions sgd;
  AdamOptions adam;
  AdamWOptions adamw;
  LAMBOptions lamb;
  LARSOptions lars;
  ClippingOptions clipping;
  double ema_decay = 0;
};

OptimizerMessage to_message(const StrategyOptions& options);  // what of it is about the optimizer
StrategyOptions from_message(const OptimizerMessage& message);

}  // namespace lockstep
