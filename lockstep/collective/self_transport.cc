#include "lockstep/collective/self_transport.h"

#include "lockstep/base/error.h"

namespace lockstep {
namespace {

class Done : public Pending {
 public:
  void wait() override {}
  void wait(Deadline) override {}
  bool done() override { return true; }
};

class SelfTransport : public Transport {
 public:
  std::shared_ptr<Pending> start(Collective call) override {
    const torch::NoGradGuard no_grad;
    if (call.output.defined() && !call.output.is_same(call.input)) call.output.view(-1).copy_(call.input.view(-1));
    return make_done();
  }
  std::shared_ptr<Pending> start_send(const torch::Tensor&, int, int) override { throw alone(); }
  std::shared_ptr<Pending> start_receive(const torch::Tensor&, int, int) override { throw alone(); }
  std::unique_ptr<Transport> group(const RankLists&) override { return make_self(); }
  std::unique_ptr<Transport> separate(const RankLists&, std::chrono::milliseconds) override { return make_self(); }
  void fail(const std::string&) override {}

 private:
  static UsageError alone() { return UsageError({.what = "a message in a world of one rank"}); }
};

}  // namespace

std::unique_ptr<Transport> make_self() { return std::make_unique<SelfTransport>(); }
std::shared_ptr<Pending> make_done() { return std::make_shared<Done>(); }

}  // namespace lockstep
