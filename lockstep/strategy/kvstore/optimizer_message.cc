#include "lockstep/strategy/kvstore/optimizer_message.h"

namespace lockstep {

OptimizerMessage to_message(const StrategyOptions& options) {
  OptimizerMessage message{.sgd = options.sgd,
                           .adam = options.adam,
                           .adamw = options.adamw,
                           .lamb = options.lamb,
                           .lars = options.lars,
                           .clipping = options.clipping,
                           .ema_decay = options.ema_decay};
  options.optimizer.copy(message.name.data(), message.name.size() - 1);
  return message;
}

StrategyOptions from_message(const OptimizerMessage& message) {
  return {.optimizer = message.name.data(),
          .sgd = message.sgd,
          .adam = message.adam,
          .adamw = message.adamw,
          .lamb = message.lamb,
          .lars = message.lars,
          .clipping = message.clipping,
          .ema_decay = message.ema_decay};
}

}  // namespace lockstep
