// SPDX-License-Identifier: Apache-2.0
// step/published.cc: the exchange between ranks that share memory. No gradient is sent: each rank publishes where its
// gradients are, and the ranks that update a slice of the parameters read that slice of all of them.
//
// HACKING.md ("One training step") says what each of the three barriers is for.
// finish() may be called again without a step() in between, while another rank still reads the previous rows: so there
// are two tables, used alternately. A rank that writes table k % 2 has passed barrier 1 of exchange k-1; all ranks were
// there, so all have finished reading exchange k-2.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <list>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>

#include "lockstep/base/cache_line.h"
#include "lockstep/base/process/page_guard.h"
#include "lockstep/base/process/stop.h"
#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"
#include "lockstep/step/accumulated_batches.h"
#include "lockstep/step/exchange.h"
#include "lockstep/step/gradient_memory.h"
#include "lockstep/step/guards/gradient_watch.h"
#include "lockstep/step/update/mean.h"
#include "lockstep/step/update/optimizer_state.h"

namespace lockstep {
namespace {

constexpr uint64_t kNoGradient = std::numeric_limits<uint64_t>::max();

// Published by one source. The place of each parameter's gradient (8 bytes each) follows it in memory.
struct Row : BatchCounts {
  double weighted_loss;  // sum of m_t loss_t
  bool in_step;          // published by step(), not by backward()
  bool stop;             // this rank's process was asked to stop

  bool in_step_alone() const { return in_step && backwards == 0; }
  const char* call() const {
    if (!in_step) return "in backward()";
    return in_step_alone() ? "in step() without a backward()" : "in step() after loss.backward() or no_sync()";
  }
  uint64_t* places() { return reinterpret_cast<uint64_t*>(this + 1); }
};

bool has_gradient(const NamedTensor& parameter) { return parameter.tensor.grad().defined(); }

class Published : public Exchange {
 public:
  Published(SharedMemoryPtr memory, NamedTensors parameters, PublishedOptions options)
      : Exchange(std::move(memory)),
        parameters_(std::move(parameters)),
        options_(std::move(options)),
        gradient_memory_(std::make_shared<GradientMemory>(memory_, parameters_)),
        sources_(to_size(std::max(options_.shards, 1))),
        copies_(sources_.size() * parameters_.size()),
        rows_(sources_.size() * to_size(memory_->size())),
        first_row_(sources_.size() * to_size(memory_->rank())),
        row_bytes_(round_up(sizeof(Row) + sizeof(uint64_t) * parameters_.size(), kCacheLine)),
        tables_(memory_->allocate_common(2 * rows_ * row_bytes_)),
        agreement_(memory_, options_.block) {
    if (options_.updated.empty()) options_.updated = parameters_;
    for (size_t i = 0; i < parameters_.size(); ++i) index_of_[parameters_[i].tensor.unsafeGetTensorImpl()] = i;
  }

  // ---- Around backward(), which leaves the gradients where the other ranks can read them. Sends nothing, blocks nowhere.

  double begin(const BatchWeight& batch, const torch::Tensor& loss, bool /*exchanges*/) override {
    memory_->require_own_process();  // .grad is in memory that its parent uses, too
    if (failed_) throw after_failed_backward();
    page_guards_.clear();
    require_mean_dropped();
    forget_mean();
    if (!forget_dropped_gradients()) require_only_counted_gradients(batch.samples);
    if (sources_.front().batches.is_plain) sources_.front() = {};  // gradients of zero, which a step() has counted
    begun_ = &current_source();
    const double factor = begun_->batches.add(batch, loss);
    failed_ = true;  // unless end() is called
    scope_.emplace(*gradient_memory_);
    return factor;
  }

  void end(bool exchanges) override {
    scope_.reset();
    failed_ = false;
    if (options_.shards > 0) {
      take_grads(*begun_);
      for (auto& [name, parameter] : parameters_) parameter.mutable_grad().reset();
    }
    if (exchanges) return;
    is_published_ = has_stepped_ = false;  // to be published before the next step; a zero_grad() drops what is counted
    watch_.remember();
  }

  void cancel(const std::string& reason) override {
    scope_.reset();
    failed_ = true;
    memory_->fail(reason);
  }

  // ---- The exchange

  BatchTotals finish() override { return exchange(/*in_step=*/false); }

  void drop() override {
    for (Source& source : sources_) source = {};
    is_published_ = false;
  }

  void make_mean() override {
    if (options_.shards > 0)
      throw UsageError(
          {.what = "mean_gradients() with virtual shards", .next = "clip with the optimizer's set_clipping()"});
    if (is_mean_ && is_published_ && !watch_.changed()) return;
    if (is_mean_) is_published_ = false;  // it may be a plain loss.backward() that has changed it
    prepare_step();
    watch_.require_unchanged();
    page_guards_.clear();
    give_all_a_gradient();
    agreement_.in_mean(StepPhase::kMean);
    write_mean();
    agreement_.in_mean(StepPhase::kMeanEnd);
    take_back_copies();
    watch_.remember();
    is_mean_ = true;
  }

  // ---- In step()

  size_t kept_sources() const override { return memory_->outlives_ranks() ? rows_ : 0; }

  WeightedGradients begin_update(const Tensors& parameters, const StepSettings& settings) override {
    prepare_step();
    if (is_mean_)
      publish_mean();
    else
      watch_.require_unchanged();
    WeightedGradients gradients{.weights = weights()};
    gradients.pointers.reserve(parameters.size() * rows_);
    agreement_.begin_update(with_mean_changed(settings, is_mean_ && mean_was_changed_));  // barrier 2
    for (const torch::Tensor& parameter : parameters) {
      const auto found = index_of_.find(parameter.unsafeGetTensorImpl());  // none: frozen
      for (size_t i = 0; i < rows_; ++i) {
        const bool counts = found != index_of_.end() && !(is_mean_ && gradients.weights[i] == 0);
        gradients.pointers.push_back(counts ? gradient(i, found->second) : nullptr);
      }
    }
    return gradients;
  }

  void end_update() override {
    agreement_.end_update();  // barrier 3: no rank reads gradients any more, and all slices are updated
    is_published_ = false;
    has_stepped_ = true;
    page_guards_.clear();
    for (Source& source : sources_)
      if (options_.shards > 0)
        source = {};
      else
        source.gradients.clear();  // zero_grad() gives their memory back; until then they count
  }

 private:
  // Gradients that this rank computed since the last step, or those of one shard.
  struct Source {
    AccumulatedBatches batches;
    Tensors gradients;  // of each parameter
  };

  // Note [The publication table]
  // Two tables in memory that all ranks share, used alternately. Each has a row per source, ordered by rank, then by the
  // rank's shard; a row of P parameters takes 64 + 8 P bytes, rounded up to cache lines, so that no two ranks write to
  // the same line. A rank writes its own rows only, before barrier 1, and reads all rows after it.
  Row& row(size_t i) const { return *reinterpret_cast<Row*>(tables_.get() + (table_ * rows_ + i) * row_bytes_); }
  int rank_of(size_t row) const { return static_cast<int>(row / sources_.size()); }

  // Returns where a source's gradient is; nullptr: it has none.
  std::byte* gradient(size_t source, size_t parameter) const {
    const uint64_t place = std::atomic_ref(row(source).places()[parameter]).load(std::memory_order_relaxed);
    return place == kNoGradient ? nullptr
                                : memory_->peer(rank_of(source), place, parameters_[parameter].tensor.nbytes());
  }

  // The gradients are published, or the mean.
  void prepare_step() {
    require_open();
    if (failed_) throw after_failed_backward({}, "step() was called after a backward()");
    agreement_.require_parameters_untouched();
    if (is_published_) return;
    forget_mean();
    exchange(/*in_step=*/true);
  }

  BatchTotals exchange(bool in_step) {
    const Stopwatch watch;
    if (options_.block) options_.block->require_not_moved();  // copies have the size of the parameters as they were
    if (in_step) count_what_step_finds();
    if (options_.shards == 0) take_grads(sources_.front());
    table_ = 1 - table_;
    for (size_t i = 0; i < sources_.size(); ++i) publish(i, in_step);
    watch_.remember();
    if (check_interval() > 0) protect_gradients();
    is_published_ = true;
    has_stepped_ = false;
    agreement_.end_backward();  // barrier 1: all rows are written
    require_same_calls();
    const BatchTotals totals = this->totals();
    if (options_.on_finished) options_.on_finished(totals);
    seconds_ += watch.seconds();
    return totals;
  }

  // After a zero_grad() what was counted until then no longer counts. Returns whether it has found one, and nothing since.
  bool forget_dropped_gradients() {
    if (options_.shards > 0 || sources_.front().batches.samples == 0) return false;  // there was no gradient
    const bool nothing = std::ranges::none_of(options_.updated, has_gradient) || watch_.zeroed();
    if (!nothing && !watch_.dropped()) return false;
    sources_.front() = {};
    return nothing;
  }

  // A backward() is about to add to .grad, where there must be no more than what was counted.
  void require_only_counted_gradients(int64_t samples) const {
    const AccumulatedBatches& batches = sources_.front().batches;
    if (options_.shards > 0) return;
    if (batches.samples > 0 && !batches.is_plain) return watch_.require_unchanged();
    if (samples > 0) require_no_gradient(options_.updated);
  }

  // Before an exchange in step(): what a plain loss.backward() has left in .grad counts as one sample.
  void count_what_step_finds() {
    if (options_.shards > 0)
      throw UsageError({.what = concat("step() before all of the ", sources_.size(),
                                       " backward() of a step with as many shards on this rank"),
                        .next = "call ddp.backward() for each shard first"});
    forget_dropped_gradients();
    AccumulatedBatches& batches = sources_.front().batches;
    // After a step(), zero_grad(false) and loss.backward() can't be told from loss.backward() alone.
    const bool known = batches.samples > 0 && !batches.is_plain;
    if (known && !(has_stepped_ && watch_.changed())) return watch_.require_unchanged();
    if (batches.backwards > 0 && batches.samples == 0 && !watch_.changed()) return;  // backward() without samples
    batches = {};
    if (std::ranges::any_of(parameters_, has_gradient)) batches.add_unknown();
  }

  // ---- The mean in .grad

  void require_mean_dropped() const {
    if (is_mean_ && std::ranges::any_of(options_.updated, has_gradient) && !watch_.zeroed())
      throw UsageError({.what = "backward() would add to the mean over all ranks",
                        .likely = "no zero_grad() since gradients were clipped, or since mean_gradients()",
                        .next = "call zero_grad() after each step(); clip after the last backward() of a step"});
  }

  void forget_mean() {
    if (std::exchange(is_mean_, false)) sources_.front() = {};
  }

  // A parameter that some rank has a gradient for gets one here, too: all ranks come to the same mean. Others read this row
  // meanwhile, and whatever they find, they find a gradient on some rank.
  void give_all_a_gradient() {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (gradient(first_row_, i) != nullptr) continue;
      size_t source = 0;
      while (source < rows_ && gradient(source, i) == nullptr) ++source;
      if (source == rows_) continue;
      torch::Tensor& parameter = parameters_[i].tensor;
      {
        const GradientMemory::Scope scope(*gradient_memory_);
        parameter.mutable_grad() = torch::zeros_like(parameter);
      }
      sources_.front().gradients[i] = parameter.grad();
      std::atomic_ref(row(first_row_).places()[i]).store(place_for_peers(0, i), std::memory_order_relaxed);
    }
  }

  // Each rank writes its chunks, as in an update.
  void write_mean() {
    const std::vector<Chunk> chunks = cut_into_chunks(tensors_of(parameters_));
    const int rank = memory_->rank(), ranks = memory_->size();
    const std::vector<double> weights = this->weights();
    on_own_cores(first_chunk_of(rank, ranks, chunks), first_chunk_of(rank + 1, ranks, chunks), 8,
                 [&](size_t from, size_t to) {
                   std::vector<Term> terms(rows_);
                   for (const auto& [parameter, begin, count] : std::span(chunks).subspan(from, to - from)) {
                     if (gradient(first_row_, parameter) == nullptr) continue;
                     for (size_t s = 0; s < rows_; ++s) terms[s] = {gradient(s, parameter), weights[s]};
                     replace_by_sum(terms, parameters_[parameter].tensor.scalar_type(), begin, count);
                   }
                 });
  }

  // From gradients that were copied when they were published.
  void take_back_copies() {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const auto& [data, place] = copies_[i];
      if (data == nullptr || row(first_row_).places()[i] != place) continue;
      torch::Tensor& gradient = parameters_[i].tensor.mutable_grad();
      const torch::Tensor copy = like_parameter(i, data.get());
      if (gradient.layout() == torch::kStrided)
        gradient.copy_(copy);
      else
        gradient = copy.clone();
    }
  }

  // A plain loss.backward() may have changed the mean: .grad is then this rank's own again. So all ranks' gradients count where
  // it was changed: their mean is right, whoever did it.
  void publish_mean() {
    mean_was_changed_ = watch_.changed().has_value();
    if (!mean_was_changed_) return;
    for (size_t i = 0; i < parameters_.size(); ++i) sources_.front().gradients[i] = parameters_[i].tensor.grad();
    publish_places(0);
  }

  // The source that the next backward() adds to: the next unused shard, or the only source.
  Source& current_source() {
    if (options_.shards == 0) return sources_.front();
    const auto unused = std::ranges::find(sources_, 0U, [](const Source& source) { return source.batches.backwards; });
    if (unused == sources_.end()) throw too_many_backwards(sources_.size());
    return *unused;
  }

  void take_grads(Source& source) const {
    source.gradients.clear();
    source.gradients.reserve(parameters_.size());
    for (const auto& [name, parameter] : parameters_)
      source.gradients.push_back(source.batches.samples > 0 ? parameter.grad() : torch::Tensor());
  }

  void publish(size_t source, bool in_step) {
    const AccumulatedBatches& batches = sources_[source].batches;
    row(first_row_ + source) = {batches, batches.loss(), in_step, wants_to_stop()};
    bytes_ += publish_places(source);
  }

  // Returns of how many bytes.
  int64_t publish_places(size_t source) {
    const auto& gradients = sources_[source].gradients;
    int64_t bytes = 0;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const bool has_one = i < gradients.size() && gradients[i].defined() && gradients[i].numel() > 0;
      row(first_row_ + source).places()[i] = has_one ? place_for_peers(source, i) : kNoGradient;
      if (has_one) bytes += to_int64(parameters_[i].tensor.nbytes());
    }
    return bytes;
  }

  // Returns where the other ranks find the gradient: where autograd wrote it, if in shared memory and laid out as the
  // parameter, else in a copy.
  uint64_t place_for_peers(size_t source, size_t i) {
    const torch::Tensor& parameter = parameters_[i].tensor;
    const torch::Tensor& gradient = sources_[source].gradients[i];
    const bool is_alike = gradient.key_set() == parameter.key_set() && gradient.dtype() == parameter.dtype() &&
                          gradient.sizes() == parameter.sizes() && gradient.strides() == parameter.strides();
    if (const auto place = is_alike ? gradient_memory_->place_of(gradient) : std::nullopt) return *place;
    SharedMemory::Own& copy = copies_[source * parameters_.size() + i];
    if (copy.data == nullptr) copy = memory_->allocate(parameter.nbytes());
    if (is_alike) {
      std::memcpy(copy.data.get(), gradient.const_data_ptr(), parameter.nbytes());
    } else {
      const torch::NoGradGuard no_grad;
      like_parameter(i, copy.data.get()).copy_(gradient.layout() == torch::kStrided ? gradient : gradient.to_dense());
    }
    return copy.place;
  }

  torch::Tensor like_parameter(size_t i, std::byte* data) const {
    const torch::Tensor& parameter = parameters_[i].tensor;
    return torch::from_blob(data, parameter.sizes(), parameter.strides(), parameter.options().requires_grad(false));
  }

  // All ranks read the same rows, and so throw together. A rank without samples may be in join(): it can't know whether the
  // others call backward(), or step() after a plain loss.backward().
  void require_same_calls() const {
    const auto first = [&](const auto& is_so) {
      size_t i = 0;
      while (i < rows_ && !is_so(row(i))) ++i;
      return i;
    };
    const auto require_not_both = [&](size_t one, size_t other) {
      if (one < rows_ && other < rows_)
        throw calls_differ({.what = concat("rank ", rank_of(one), " is ", row(one).call(), ", rank ", rank_of(other),
                                           " ", row(other).call()),
                            .here = concat("rank ", memory_->rank(), " of ", memory_->size(), " on this machine")});
    };
    require_not_both(first([](const Row& row) { return !row.in_step && row.samples > 0; }),
                     first([](const Row& row) { return row.in_step; }));
    require_not_both(first([](const Row& row) { return !row.in_step || row.samples > 0; }),
                     first([](const Row& row) { return row.in_step_alone(); }));
  }

  BatchTotals totals() {
    double samples = 0, loss = 0;
    std::vector<RankWeight> weights;
    for (size_t i = 0; i < rows_; ++i) {
      weights.push_back(row(i).weight_of_rank);
      samples += row(i).samples;
      loss += row(i).weighted_loss;
      if (row(i).stop) agree_to_stop();
    }
    ranks_alike_ = compare_weights(weights, memory_->rank());
    return {static_cast<int64_t>(samples), loss / samples};
  }

  // Gradients elsewhere, such as sparse ones, were copied: step() finds a write to .grad.
  void protect_gradients() {
    page_guards_.clear();
    for (const Source& source : sources_)
      for (size_t i = 0; i < source.gradients.size(); ++i)
        if (const torch::Tensor& gradient = source.gradients[i];
            gradient.defined() && gradient_memory_->place_of(gradient))
          page_guards_.emplace_back(
              PageGuard::Kind::kGradients,
              std::vector<PageGuard::Part>{
                  {parameters_[i].name, static_cast<const std::byte*>(gradient.const_data_ptr()), gradient.nbytes()}});
  }

  // The weight of a source with unit u is u T / n: n samples in all, T backward() per step. Of n ranks that count alike it
  // is 1 / n.
  std::vector<double> weights() const {
    std::vector<double> weights;
    if (is_mean_) {
      weights.resize(rows_, mean_was_changed_ ? 1.0 / static_cast<double>(rows_) : 0);
      if (!mean_was_changed_) weights.front() = 1;
      return weights;
    }
    double samples = 0;
    for (size_t i = 0; i < rows_; ++i) {
      samples += row(i).samples;
      weights.push_back(row(i).unit);
    }
    const double backwards = backwards_per_step();
    double factor = samples > 0 ? backwards / samples : 0;
    if (ranks_alike_ > 0) factor = 1 / ranks_alike_;
    for (double& weight : weights) weight *= factor;
    return weights;
  }

  // T. A rank that had no samples at first may have counted backward() whose gradients the others have dropped since, by
  // zero_grad(): of its b backward() at least those since the first with samples count, b - leading, and at most b. A rank
  // without any samples, such as one in join(), leaves it to the others.
  double backwards_per_step() const {
    const auto least = [&](size_t i) { return row(i).samples > 0 ? row(i).backwards - row(i).leading : 0; };
    size_t most = 0;  // the row with the most backward() that count for sure
    for (size_t i = 1; i < rows_; ++i)
      if (least(i) > least(most)) most = i;
    for (size_t i = 0; i < rows_; ++i)
      if (row(i).samples > 0 && row(i).backwards < least(most))
        throw MismatchError(
            {.what = concat("rank ", rank_of(i), " called backward() ", row(i).backwards,
                            " times since the last zero_grad(), rank ", rank_of(most), " ", least(most), " times"),
             .likely = "no_sync() or zero_grad() on some ranks only",
             .next = "call backward() equally often on all ranks; with 0 samples where a rank has no batch"});
    return least(most);
  }

  NamedTensors parameters_;
  PublishedOptions options_;
  std::unordered_map<const void*, size_t> index_of_;  // TensorImpl -> index in parameters_
  std::shared_ptr<GradientMemory> gradient_memory_;
  std::optional<GradientMemory::Scope> scope_;  // between begin() and end()
  Source* begun_ = nullptr;                     // by begin()
  std::vector<Source> sources_;
  std::list<PageGuard> page_guards_;       // of published gradients, with LOCKSTEP_CHECK
  std::vector<SharedMemory::Own> copies_;  // [source][parameter]
  size_t rows_;                            // of a table: one per source of each rank
  size_t first_row_;                       // of this rank
  size_t row_bytes_;
  std::shared_ptr<std::byte> tables_;
  size_t table_ = 0;                       // in use: 0 or 1
  bool is_published_ = false;              // since the last step
  bool has_stepped_ = false;               // since the last exchange or backward()
  bool is_mean_ = false;                   // .grad, since a make_mean(), until the next backward()
  bool mean_was_changed_ = false;          // by hand, before the last step
  GradientWatch watch_{options_.updated};  // since then
  StepAgreement agreement_;
  double ranks_alike_ = 0;  // of the last exchange, by compare_weights()
  bool failed_ = false;
};

}  // namespace

std::shared_ptr<Exchange> publish_gradients(SharedMemoryPtr memory, NamedTensors parameters, PublishedOptions options) {
  return std::make_shared<Published>(std::move(memory), std::move(parameters), std::move(options));
}

}  // namespace lockstep
