"""Provides chat templates that behave like published ones, but were written for these tests.

The tags ``{% generation %}`` and ``{% endgeneration %}`` enclose what a template writes for the
assistant, from the end of the generation prompt to the next turn. The function :func:`unmarked`
removes these tags. Without them, the tokenizer must find the same text by its position.
"""

from __future__ import annotations

TAGS = ("{% generation %}", "{% endgeneration %}")


def unmarked(template: str) -> str:
    for tag in TAGS:
        template = template.replace(tag, "")
    return template


def _bracketed(system: str, user: str, answer: str, *, strict: bool = True) -> str:
    """Returns a template with turns like those of models that use [INST].

    The arguments contain template text for messages of the system, the user and the assistant. The
    system's text is written before the first user message. If ``strict`` is true, user and
    assistant must alternate.
    """
    check = (
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('user and assistant take turns') }}{% endif %}"
    )
    return (
        "{% if messages and messages[0].role == 'system' %}"
        "{% set rest = messages[1:] %}{% set about = messages[0].content %}"
        "{% else %}{% set rest = messages %}{% set about = none %}{% endif %}"
        f"{{{{ bos_token }}}}{{% for m in rest %}}{check if strict else ''}"
        "{% if m.role == 'user' %}"
        f"{{% if loop.first and about is not none %}}{system}{{% endif %}}{user}"
        f"{{% elif m.role == 'assistant' %}}{{% generation %}}{answer}{{% endgeneration %}}"
        "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
    )


def _headed(begin: str, head: str, end: str, *, said: str = "{{ m.content }}") -> str:
    """Returns a template in which each turn has a header with its role.

    ``begin`` is the start of the whole text. A turn consists of the header ``head``, the content
    ``said`` and the text ``end``.
    """
    asked = head.replace("m.role", "'assistant'")
    return (
        f"{begin}{{% for m in messages %}}{head}"
        f"{{% if m.role == 'assistant' %}}{{% generation %}}{said}{end}{{% endgeneration %}}"
        f"{{% else %}}{said}{end}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{asked}{{% endif %}}"
    )


_IM = ("<|im_start|>{{ m.role }}\n", "<|im_end|>\n")
_DEFAULT_SYSTEM = (
    "{% if not messages or messages[0].role != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
)
_LLAMA_3 = ("<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n", "<|eot_id|>")
_CALLS_AS_TAGS = (
    "{% for c in m.tool_calls or [] %}"
    '\n<tool_call>\n{"name": "{{ c.function.name }}", '
    '"arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
_TOOLS_IN_TAGS = (
    "{% if tools %}<|im_start|>system\n"
    "{% if messages and messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "# Tools\n<tools>{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n</tools><|im_end|>\n"
    "{% elif messages and messages[0].role == 'system' %}"
    "<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
)
_TOOL_RESULTS = (
    "{% elif m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)


def _tagged(answer: str, prompt: str, before: str = "") -> str:
    """Returns a template that writes tools and their results in tags, like Qwen and Hermes.

    ``answer`` is the template text for an answer. ``prompt`` is the end of the generation prompt,
    and ``before`` is inserted before the messages.
    """
    return (
        f"{_TOOLS_IN_TAGS}{before}{{% for m in messages %}}"
        "{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        f"{{% elif m.role == 'assistant' %}}<|im_start|>assistant\n{answer}"
        f"{_TOOL_RESULTS}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}<|im_start|>assistant\n{prompt}{{% endif %}}"
    )


_LAST_QUERY = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
# This template text sets r to the reasoning in a message, and c to the rest of the message.
_THOUGHTS = (
    "{% set c = m.content or '' %}{% set r = m.reasoning_content or '' %}"
    "{% if c is string and '</think>' in c %}"
    "{% set r = c.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
)
_QWEN_3 = _tagged(
    f"{_THOUGHTS}{{% generation %}}"
    "{% if loop.index0 > ns.last and (loop.last or r) %}<think>\n{{ r }}\n</think>\n\n{% endif %}"
    f"{{{{ c }}}}{_CALLS_AS_TAGS}<|im_end|>\n{{% endgeneration %}}",
    "",
    _LAST_QUERY,
)
_QWEN_3_THINKING = _tagged(
    f"{_THOUGHTS}"
    "{% if loop.index0 > ns.last and r %}<think>\n{% generation %}{{ r }}\n</think>\n\n"
    f"{{{{ c }}}}{_CALLS_AS_TAGS}<|im_end|>\n{{% endgeneration %}}"
    f"{{% else %}}{{% generation %}}{{{{ c }}}}{_CALLS_AS_TAGS}<|im_end|>\n{{% endgeneration %}}"
    "{% endif %}",
    "<think>\n",
    _LAST_QUERY,
)
_CALLS_OF_MISTRAL = (
    "[TOOL_CALLS] [{% for c in m.tool_calls %}{% if not loop.first %}, {% endif %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "{% endfor %}]"
)
_MISTRAL_3 = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.index0 == ns.last %}"
    "[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.role == 'assistant' and m.tool_calls %}"
    f"{{% generation %}}{_CALLS_OF_MISTRAL}{{{{ eos_token }}}}{{% endgeneration %}}"
    "{% elif m.role == 'assistant' %}"
    "{% generation %} {{ m.content | trim }}{{ eos_token }}{% endgeneration %}{% endif %}"
    "{% endfor %}"
)
_LLAMA_31_TOOLS = (
    "{{ bos_token }}{% if tools %}<|start_header_id|>system<|end_header_id|>\n\n"
    "Environment: ipython\n{% for t in tools %}{{ t | tojson(indent=4) }}\n\n{% endfor %}"
    "<|eot_id|>{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n"
    "{{ m.content | tojson }}<|eot_id|>"
    "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if m.role != 'assistant' %}{{ m.content | trim }}<|eot_id|>"
    "{% elif m.tool_calls %}{% generation %}{% set f = m.tool_calls[0].function %}"
    '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}<|eot_id|>'
    "{% endgeneration %}{% else %}"
    "{% generation %}{{ m.content | trim }}<|eot_id|>{% endgeneration %}{% endif %}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content | trim }}<end_of_turn>\n{% endgeneration %}"
    "{% else %}{{ m.content | trim }}<end_of_turn>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_GEMMA_3 = (
    "{{ bos_token }}{% set ns = namespace(about='') %}"
    "{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.about = (m.content if m.content is string else m.content[0].text) ~ '\n\n' %}"
    "{% else %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}"
    "{% if m.content is string %}{{ m.content | trim }}{% else %}"
    "{% for part in m.content %}{{ part.text | trim }}{% endfor %}{% endif %}<end_of_turn>\n"
    "{% endgeneration %}{% else %}{{ ns.about }}{% set ns.about = '' %}"
    "{% if m.content is string %}{{ m.content | trim }}{% else %}"
    "{% for part in m.content %}{{ part.text | trim }}{% endfor %}{% endif %}<end_of_turn>\n"
    "{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_PHI_3 = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|end|>\n"
    "{% if loop.last and not add_generation_prompt %}{{ eos_token }}{% endif %}{% endgeneration %}"
    "{% else %}{{ m.content }}<|end|>\n"
    "{% if loop.last and not add_generation_prompt %}{{ eos_token }}{% endif %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_DEEPSEEK_2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}User: {{ m.content }}\n\n"
    "{% elif m.role == 'assistant' %}"
    "Assistant:{% generation %} {{ m.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ m.content }}\n\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
_SYSTEM_FIRST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}"
    "{% endfor %}"
)
_CALLS_OF_DEEPSEEK = (
    "{% if m.tool_calls %}<|calls_begin|>{% for c in m.tool_calls %}"
    "<|call_begin|>{{ c.function.name }}\n{{ c.function.arguments | tojson }}<|call_end|>"
    "{% endfor %}<|calls_end|>{% endif %}"
)
_DEEPSEEK_3 = (
    f"{_SYSTEM_FIRST}{{% for m in messages %}}"
    "{% if m.role == 'user' %}<|User|>{{ m.content }}"
    "{% elif m.role == 'tool' %}<|tool|>{{ m.content }}<|tool_end|>"
    "{% elif m.role == 'assistant' %}<|Assistant|>{% generation %}{{ m.content }}"
    f"{_CALLS_OF_DEEPSEEK}{{{{ eos_token }}}}{{% endgeneration %}}{{% endif %}}{{% endfor %}}"
    "{% if add_generation_prompt %}<|Assistant|>{% endif %}"
)
# This template omits the reasoning in all turns, but its generation prompt starts a new reasoning.
_DEEPSEEK_R1 = (
    f"{_SYSTEM_FIRST}{{% for m in messages %}}"
    "{% if m.role == 'user' %}<|User|>{{ m.content }}"
    "{% elif m.role == 'tool' %}<|tool|>{{ m.content }}<|tool_end|>"
    "{% elif m.role == 'assistant' %}<|Assistant|>{% generation %}"
    "{{ (m.content or '').split('</think>')[-1] }}"
    f"{_CALLS_OF_DEEPSEEK}{{{{ eos_token }}}}{{% endgeneration %}}{{% endif %}}{{% endfor %}}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
_VICUNA = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }} "
    "{% elif m.role == 'user' %}USER: {{ m.content }} "
    "{% elif m.role == 'assistant' %}"
    "ASSISTANT:{% generation %} {{ m.content }}{{ eos_token }}{% endgeneration %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
_ALPACA = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}\n\n"
    "{% elif m.role == 'user' %}### Instruction:\n{{ m.content }}\n\n"
    "{% elif m.role == 'assistant' %}### Response:\n"
    "{% generation %}{{ m.content }}{{ eos_token }}\n\n{% endgeneration %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}### Response:\n{% endif %}"
)
_COMMAND = (
    "{{ bos_token }}{% if documents %}<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>"
    "{% for d in documents %}Document: {{ loop.index0 }}\n{{ d.title }}\n{{ d.text }}\n"
    "{% endfor %}<|END_OF_TURN_TOKEN|>{% endif %}{% for m in messages %}<|START_OF_TURN_TOKEN|>"
    "{% if m.role == 'assistant' %}<|CHATBOT_TOKEN|>"
    "{% generation %}{{ m.content | trim }}<|END_OF_TURN_TOKEN|>{% endgeneration %}"
    "{% elif m.role == 'system' %}<|SYSTEM_TOKEN|>{{ m.content }}<|END_OF_TURN_TOKEN|>"
    "{% else %}<|USER_TOKEN|>{{ m.content | trim }}<|END_OF_TURN_TOKEN|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"
)
_GRANITE = (
    "{% if tools %}<|start_of_role|>available_tools<|end_of_role|>{{ tools | tojson(indent=4) }}"
    "<|end_of_text|>\n{% endif %}"
    "{% if documents %}<|start_of_role|>documents<|end_of_role|>"
    "{% for d in documents %}{{ d.text }}{% if not loop.last %}\n\n{% endif %}{% endfor %}"
    "<|end_of_text|>\n{% endif %}"
    + _headed("", "<|start_of_role|>{{ m.role }}<|end_of_role|>", "<|end_of_text|>\n")
)
_OLMO_2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>\n"
    "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
    "{% if not loop.last %}{{ '\n' }}{% endif %}"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_SMOLLM_3 = (
    "<|im_start|>system\n## Metadata\nReasoning Mode: /think\n"
    "{% if messages and messages[0].role == 'system' %}{{ messages[0].content | trim }}\n"
    "{% endif %}<|im_end|>\n{% for m in messages %}{% if m.role == 'user' %}"
    "<|im_start|>user\n{{ m.content }}<|im_end|>\n{% elif m.role == 'assistant' %}"
    "<|im_start|>assistant\n{% generation %}{{ m.content }}<|im_end|>\n{% endgeneration %}"
    "{% elif m.role == 'tool' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_FALCON = (
    "{% for m in messages %}{% if not loop.first %}{{ '\n\n' }}{% endif %}"
    "{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'assistant' %}Assistant:"
    "{% generation %} {{ m.content.replace('\r\n', '\n').replace('\n\n', '\n') }}{{ eos_token }}"
    "{% endgeneration %}{% else %}User: {{ m.content.replace('\n\n', '\n') }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '\n\n' }}Assistant:{% endif %}"
)
_GLM_4 = (
    "[gMASK]<sop>{% if tools %}<|system|>\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "{% endif %}{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>"
    "{% generation %}{{ '\n' }}{{ m.content }}{% endgeneration %}"
    "{% elif m.role == 'tool' %}<|observation|>\n{{ m.content }}"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_GLM_45 = (
    f"[gMASK]<sop>{_LAST_QUERY}{{% for m in messages %}}{{% if m.role == 'assistant' %}}"
    f"<|assistant|>{_THOUGHTS}{{% generation %}}"
    "{{ '\n' }}{% if loop.index0 > ns.last and r %}<think>{{ r | trim }}</think>"
    "{% else %}<think></think>{% endif %}"
    "{% if c is string and c.strip() %}{{ '\n' }}{{ c.strip() }}{% endif %}"
    f"{_CALLS_AS_TAGS}<|end|>{{% endgeneration %}}"
    "{% elif m.role == 'tool' %}<|observation|>\n{{ m.content }}"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_HERMES = _tagged(
    "{% generation %}{{ m.content or '' }}" + _CALLS_AS_TAGS + "<|im_end|>\n{% endgeneration %}", ""
)
_FUNCTIONARY = (
    "{{ bos_token }}{% for m in messages %}"
    "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{% if m.role == 'assistant' %}>>>"
    "{% generation %}{% if m.content %}all\n{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{% if m.content or not loop.first %}>>>{% endif %}"
    "{{ c.function.name }}\n{{ c.function.arguments | tojson }}{% endfor %}<|eot_id|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n>>>{% endif %}"
)
_NEMOTRON = (
    "<extra_id_0>System\n{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
    "{% endif %}{% endfor %}\n{% for m in messages %}"
    "{% if m.role == 'assistant' %}<extra_id_1>Assistant\n"
    "{% generation %}{{ m.content | trim }}\n{% endgeneration %}"
    "{% elif m.role != 'system' %}<extra_id_1>User\n{{ m.content | trim }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<extra_id_1>Assistant\n{% endif %}"
)
_KIMI = (
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "<|im_system|>system<|im_middle|>You are helpful<|im_end|>{% endif %}"
    "{% if m.role == 'assistant' %}<|im_assistant|>assistant<|im_middle|>"
    "{% generation %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "<|call|>{{ c.id }}<|args|>{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>"
    "{% endgeneration %}{% elif m.role == 'system' %}"
    "<|im_system|>system<|im_middle|>{{ m.content }}<|im_end|>"
    "{% else %}<|im_user|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
# This template writes the reasoning only in the last turn, and ends this turn in a different way.
_CHANNELS = (
    "<|start|>system<|message|>Reasoning: medium<|end|>{% for m in messages %}"
    "{% if m.role == 'assistant' %}<|start|>assistant{% generation %}"
    "{% if loop.last and m.thinking %}"
    "<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>assistant{% endif %}"
    "<|channel|>final<|message|>{{ m.content }}"
    "{% if loop.last %}<|return|>{% else %}<|end|>{% endif %}{% endgeneration %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
_SOLAR = (
    "{% for m in messages %}{% if m.role == 'system' %}### System:\n{{ m.content }}\n\n"
    "{% elif m.role == 'user' %}### User:\n{{ m.content }}\n\n"
    "{% elif m.role == 'assistant' %}### Assistant:\n"
    "{% generation %}{{ m.content }}{{ eos_token }}\n\n{% endgeneration %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}### Assistant:\n{% endif %}"
)
_OPENCHAT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
    "GPT4 Correct Assistant:{% generation %} {{ m.content }}<|end_of_turn|>{% endgeneration %}"
    "{% else %}GPT4 Correct {{ m.role.title() }}: {{ m.content }}<|end_of_turn|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}GPT4 Correct Assistant:{% endif %}"
)
_MINICPM = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<AI>"
    "{% generation %}{{ m.content | trim }}{{ eos_token }}{% endgeneration %}"
    "{% else %}<用户>{{ m.content | trim }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<AI>{% endif %}"
)

TEMPLATES: dict[str, str] = {
    "llama-2": _bracketed(
        "",
        "[INST] {% if loop.first and about is not none %}<<SYS>>\n{{ about }}\n<</SYS>>\n\n"
        "{% endif %}{{ m.content | trim }} [/INST]",
        " {{ m.content | trim }} {{ eos_token }}",
    ),
    "llama-3": _headed("{{ bos_token }}", *_LLAMA_3, said="{{ m.content | trim }}"),
    "llama-3.1": _LLAMA_31_TOOLS,
    "llama-3.2": _headed(
        "{{ bos_token }}{% set date = date_string | default('26 Jul 2024') %}"
        "<|start_header_id|>system<|end_header_id|>\n\nToday Date: {{ date }}<|eot_id|>",
        *_LLAMA_3,
    ),
    "qwen-2": _headed(_DEFAULT_SYSTEM, *_IM),
    "qwen-2.5": _tagged(
        "{% generation %}{{ m.content }}" + _CALLS_AS_TAGS + "<|im_end|>\n{% endgeneration %}", ""
    ),
    "qwen-3": _QWEN_3,
    "qwen-3-thinking": _QWEN_3_THINKING,
    "mistral-1": _bracketed(
        "{{ about }}\n", "[INST] {{ m.content }} [/INST]", "{{ m.content }}</s>"
    ),
    "mistral-3": _MISTRAL_3,
    "mistral-tekken": _bracketed(
        "[SYSTEM_PROMPT]{{ about }}[/SYSTEM_PROMPT]",
        "[INST]{{ m.content }}[/INST]",
        "{{ m.content }}{{ eos_token }}",
        strict=False,
    ),
    "mixtral": _bracketed("", "[INST] {{ m.content }} [/INST]", " {{ m.content }}{{ eos_token }}"),
    "gemma-1": _GEMMA,
    "gemma-2": _GEMMA.replace("'no system'", "'System role not supported'"),
    "gemma-3": _GEMMA_3,
    "phi-3": _PHI_3,
    "phi-4": _headed("", "<|im_start|>{{ m.role }}<|im_sep|>", "<|im_end|>"),
    "deepseek-2": _DEEPSEEK_2,
    "deepseek-3": _DEEPSEEK_3,
    "deepseek-r1": _DEEPSEEK_R1,
    "chatml": _headed("", *_IM),
    "zephyr": _headed("", "<|{{ m.role }}|>\n", "{{ eos_token }}\n"),
    "vicuna": _VICUNA,
    "alpaca": _ALPACA,
    "command-r": _COMMAND,
    "granite": _GRANITE,
    "olmo-2": _OLMO_2,
    "smollm-2": _headed(_DEFAULT_SYSTEM.replace("helpful", "small"), *_IM),
    "smollm-3": _SMOLLM_3,
    "falcon": _FALCON,
    "yi": _headed("", *_IM, said="{{ m.content if m.content is string else '' }}"),
    "internlm-2": _headed("{{ bos_token }}", *_IM),
    "glm-4": _GLM_4,
    "glm-4.5": _GLM_45,
    "hermes": _HERMES,
    "functionary": _FUNCTIONARY,
    "nemotron": _NEMOTRON,
    "kimi-k2": _KIMI,
    "channels": _CHANNELS,
    "exaone": _headed("", "[|{{ m.role }}|]", "[|endofturn|]\n"),
    "solar": _SOLAR,
    "openchat": _OPENCHAT,
    "minicpm": _MINICPM,
    "quoted": _headed("", *_IM, said="{{ m.content | tojson }}"),
}
